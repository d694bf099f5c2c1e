"""Grouped GEMM for Hopper: ``y[rows of group g] = x[rows of group g] @ weight[g].T``, in one persistent kernel.

The kernel computes the transposed product: rows of x are wgmma's N, and 128 rows of weight its M, 64 for each consumer
warpgroup. A CTA has 12 warps:

- Warps 0 to 7, two consumer warpgroups, issue wgmma for a stage, wait for it, and store the tile after its last stage.
- One thread of warp 8 looks up the tiles, describes them to the consumers and issues the TMA loads of weight and x.
- Warps 9 to 11 write block scales and gathered rows of x, if there are any. They take turns: each serves every third
  k block, whichever stage that is in.

A stage of the ring holds 128 bytes of k for the rows of weight (with ``silu_and_mul`` those of gate and those of up)
and for the rows of x, with their block scales, and the description of the tile that begins with it. The epilogue has
buffers of its own, so producers fill stages for the next tile meanwhile. Each stage has two mbarriers:

- full: producers arrive (the TMA thread with the number of bytes it loads, and one auxiliary warp), consumers wait.
- empty: lane 0 of each consumer warp arrives, in a cluster at the barriers of both CTAs; producers wait.

Every role goes through the same tiles in the same order and keeps its own ``stage, phase``. In a cluster, the two CTAs
have neighbouring tiles of weight and the same rows of x, of which each loads half and multicasts it to both.

``make_kernel`` reads in this order: choices at compile time; device functions that are used twice; the main loop over k
and the epilogue, once for each wgmma N; the kernel from shared memory to its last barrier; entry points. A branch
``if name:`` with a name of ``make_kernel`` is decided at compile time: Numba drops what is not taken.

With ``low_rank``, as for a LoRA adapter, y is ``x @ weight.T + x_low @ weight_low.T`` of each group. Behind a tile's k
blocks of x and weight the TMA thread loads those of x_low and weight_low, whose columns beyond the rank TMA fills with
zeros. To the consumers they are more k blocks of the same main loop.

One tensor map covers the weights of all groups and another all rows of x: a tile may load rows of the next group, whose
results the epilogue does not store. No kernel has to run before this one. Generic parts are in ``common/``: the order
of tiles (``scheduler.py``), gathered rows (``gather.py``), and scaling and storing accumulators (``epilogue_terms.py``,
``store_tile.py``).
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.block_scales import make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.constants import (
    AUX_PRODUCER_WARPS,
    BLOCK_K_BYTES,
    BLOCK_N,
    CONSUMER_WARPS,
    SharedMemory,
)
from moe_numba.grouped_gemm.common.epilogue_terms import (
    EpilogueInputs,
    make_activate,
    make_apply_row_terms,
    make_finish_gate_up,
    make_load_terms,
)
from moe_numba.grouped_gemm.common.gather import (
    GatherSource,
    index_slot,
    make_copy_rows,
    make_load_row_indices,
    wait_rows,
)
from moe_numba.grouped_gemm.common.outputs import EpilogueOperands, OutputTile
from moe_numba.grouped_gemm.common.pipeline import (
    CLUSTER_MASK,
    OperandMaps,
    Scales,
    ScaleStrides,
    allow_dependents,
    make_release_stage,
)
from moe_numba.grouped_gemm.common.scheduler import (
    Problem,
    make_count_tiles,
    make_get_banded_tile,
    make_get_tile,
    make_tile_loop,
)
from moe_numba.grouped_gemm.common.store_tile import make_epilogue, make_store_tile
from moe_numba.grouped_gemm.wgmma.config import SharedMemoryLayout, check_config
from moe_numba.grouped_gemm.wgmma.epilogue import make_store_silu_and_mul
from moe_numba.ptx.accumulators import make_fma, make_fma_columns
from moe_numba.ptx.arithmetic import float_as_int, int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.matrix import make_fma_shared, make_load_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_load_3d_hint,
    tma_load_4d_hint,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_descriptor_mn, make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

ACCUMULATOR_REGISTERS = 190  # registers of a consumer thread for accumulators, the wgmma result and scales
WEIGHT_TILE_BYTES = BLOCK_N * BLOCK_K_BYTES
HALF_TILE_ROWS = BLOCK_N // 2  # rows of weight of a consumer warpgroup


@cuda.jit(device=True)
def no_hint(value):
    """Stand in for ``uniform`` and ``uniform_array``."""
    return value


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes.

    A kernel whose epilogue reads more than the group's scale has four parameters more. With ``low_rank`` a kernel has
    these, too, and three more.
    """
    check_config(config)
    layout = SharedMemoryLayout(config)

    # ---- Choices at compile time ----
    by_block, gather, is_bf16 = config.scaling == "block", config.gather, config.dtype == "bf16"
    promotes = not is_bf16 and not config.fast_accumulation  # see `multiply_stage`
    has_aux = by_block or gather  # auxiliary producer warps
    subtile_m, m_subtiles, two_subtiles = config.subtile_m, config.m_subtiles, config.m_subtiles == 2
    cluster, stages, has_bands = config.cluster_size, config.stages, config.band_rows > 0
    silu_and_mul, quantises, weight_tiles = config.silu_and_mul, config.quantises, layout.weight_tiles
    splits_weight, interleaved, mn_major = config.splits_weight, config.interleaved, config.weight_major == "mn"
    scale_in_tile, scaled_x, has_row_terms = config.scale_in_tile, config.scaled_x, config.has_row_terms
    keep_weight, early_weight = config.keep_weight, config.early_weight
    stores_gate_up, low_rank = config.stores_gate_up, config.low_rank
    allows_early = config.block_m < 128  # see `allow_dependents`
    # An empty second subtile is not loaded. In a cluster, each CTA always loads one of the subtiles for both.
    skips_empty = two_subtiles and cluster == 1 and not gather
    block_k_shift, element_shift = (6, 1) if is_bf16 else (7, 0)
    block_k, cluster_columns = 1 << block_k_shift, BLOCK_N * cluster  # elements of k in a stage; columns of y in a tile
    scale_accumulators = layout.accumulators if by_block else 0
    lane_rows = -(-subtile_m // 32)  # rows of a subtile for each lane of an auxiliary warp
    lane_scales = lane_rows * m_subtiles
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168.
    producer_registers, consumer_registers = (56, 224) if has_aux else (40, 232) if cluster == 2 else (24, 240)

    # ---- Offsets in shared memory ----
    full, empty, tile_info_offset = layout.full, layout.empty, layout.tile_info_offset
    stage_bytes, x_offset, subtile_bytes = layout.stage_bytes, layout.x_offset, layout.subtile_bytes
    tma_bytes, box_rows = layout.tma_bytes, layout.x_box_rows
    scale_offset, stage_scales, scale_pitch = layout.scale_offset, layout.stage_scales, layout.scale_pitch
    row_index_offset, row_indices, row_index_pitch = layout.row_index_offset, layout.row_indices, layout.row_index_pitch

    # ---- Generic parts ----
    advance, (first_tile, next_tile) = make_advance(stages), make_tile_loop(cluster)
    count_tiles, get_tile = make_count_tiles(config, layout), make_get_tile(config, layout)
    get_banded_tile = make_get_banded_tile(config, layout)
    load_row_indices, copy_rows = make_load_row_indices(config, layout), make_copy_rows(config, layout)
    find_weight_scale, weight_scale_step, load_weight_scale = make_weight_scales(config.packed_weight_scale)
    x_scale_offset, load_x_scale = make_x_scales(config.packed_x_scale)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(producer_registers), make_setmaxnreg_inc(consumer_registers)
    release_stage = make_release_stage(cluster)
    to_uniform, to_uniform_array = (uniform, uniform_array) if config.warp_uniform else (no_hint, no_hint)

    # ==== Device functions that are used twice ====

    @cuda.jit(device=True)
    def look_up_tile(smem, problem, column_tiles, number):
        """Return a tile's `TileInfo`: the second of two subtiles begins ``subtile_rows`` rows behind the first."""
        if has_bands:
            return get_banded_tile(smem, problem, column_tiles, number)
        return get_tile(smem, problem, number)

    @cuda.jit(device=True)
    def publish_tile(smem, scales, tile, stage):
        """Describe a tile to the consumers in the slot of its first stage, which must be empty.

        The arrival at the stage's full barrier publishes it. The last word is the scale, the group, or unused.
        """
        info = uint32(tile_info_offset + 4 * stage)
        smem.i32[info] = tile.row
        smem.i32[info + uint32(1)] = int32(tile.rows | (tile.subtile_rows << 16))
        smem.i32[info + uint32(2)] = int32(tile.n_tile * BLOCK_N)
        if has_row_terms:
            smem.i32[info + uint32(3)] = tile.group
        elif scale_in_tile:
            scale = scales.weight[tile.group] * scales.x[0] if scaled_x else scales.weight[tile.group]
            smem.i32[info + uint32(3)] = float_as_int(scale)
        else:
            smem.i32[info + uint32(3)] = int32(0)

    @cuda.jit(device=True)
    def operands_of(maps, k_block, first_low):
        """Return the tensor maps of x and weight for a k block, and its first element of k there.

        The k blocks of x_low and weight_low begin with number ``first_low``.
        """
        if low_rank:
            if k_block >= first_low:
                return maps.x_low, maps.weight_low, int32((k_block - first_low) * block_k)
        return maps.x, maps.weight, int32(k_block * block_k)

    @cuda.jit(device=True)
    def load_weight(smem, map_weight, tile, stage, k, n, policy):
        """Load a stage's rows of weight: a tile, or with ``silu_and_mul`` one of gate and behind it one of up.

        Rows of up follow all rows of gate, or they are interleaved. If the map has 4 dimensions, [k, column, part,
        group] or [k, part, column, group], part 0 is gate and part 1 up; rows beyond either are zeros. An MN-major tile
        has one box of 64 rows of weight for each consumer warpgroup.
        """
        offset, column, group = int32(stage * stage_bytes), int32(tile.n_tile * BLOCK_N), tile.group
        barriers, barrier = smem.barriers, full + stage
        if splits_weight:
            for part in range(2):
                to = int32(offset + part * WEIGHT_TILE_BYTES)
                y, z = (int32(part), column) if interleaved else (column, int32(part))
                tma_load_4d_hint(smem.u8, to, map_weight, 0, k, y, z, group, barriers, barrier, policy)
        elif mn_major:
            to, second = int32(offset + HALF_TILE_ROWS * BLOCK_K_BYTES), int32(column + HALF_TILE_ROWS)
            tma_load_3d_hint(smem.u8, offset, map_weight, 0, column, k, group, barriers, barrier, policy)
            tma_load_3d_hint(smem.u8, to, map_weight, 0, second, k, group, barriers, barrier, policy)
        else:
            tma_load_3d_hint(smem.u8, offset, map_weight, 0, k, column, group, barriers, barrier, policy)
            if silu_and_mul:
                to, second = int32(offset + WEIGHT_TILE_BYTES), int32(n + column)
                tma_load_3d_hint(smem.u8, to, map_weight, 0, k, second, group, barriers, barrier, policy)

    # ==== Main loop and epilogue of a tile, for each wgmma N: accumulators are a tuple of N / 2 floats ====

    def make_consume_tile(mma_n, subtiles):
        """Make ``stage, phase = consume_tile(smem, output, warp, lane, stage, phase, k_blocks, tile)``."""
        two = subtiles == 2 or silu_and_mul  # accumulators: of two subtiles, or of gate and up
        zeros, load_terms = (np.float32(0),) * (mma_n // 2), make_load_terms(config)
        # A warpgroup's 64 rows of weight are a tile of one swizzle atom by 64 k if they are MN-major.
        weight_descriptor = make_wgmma_descriptor_mn(64 * BLOCK_K_BYTES) if mn_major else wgmma_descriptor
        wgmma = make_wgmma_tile(mma_n, config.dtype, accumulate=not promotes, a_major=config.weight_major)
        wait, add = make_wgmma_wait(mma_n, 0), make_fma(mma_n)
        load_scales, add_scaled = make_load_shared(mma_n), make_fma_columns(mma_n)
        add_scaled_by_shared = make_fma_shared(mma_n)
        # A thread needs its accumulators, one wgmma result, and a scale for each of its mma_n / 4 rows of x.
        needed = mma_n // 2 * (layout.accumulators + 1) + mma_n // 4
        scales_fit = promotes and by_block and needed <= ACCUMULATOR_REGISTERS
        scales_stay_shared = promotes and by_block and not scales_fit
        config_of_subtiles = config._replace(m_subtiles=subtiles)
        store_silu_and_mul, apply_row_terms = make_store_silu_and_mul(mma_n, layout), make_apply_row_terms(mma_n)
        finish_gate_up, activate = make_finish_gate_up(mma_n, config), make_activate(mma_n, config)
        store_tile = make_store_tile(mma_n, config_of_subtiles, layout)
        finish_and_store = make_epilogue(mma_n, config_of_subtiles, layout)

        @cuda.jit(device=True)
        def multiply_stage(smem, a, b, acc, scales, stage, release):
            """Add a stage's product to ``acc``; a thread with ``release`` set then releases the stage for its warp.

            FP8 tensor cores accumulate with fewer bits than float32, so the sum over a stage is added ("promoted") to
            ``acc`` in CUDA cores. ``scales`` is the f32 offset of the thread's block scales.
            """
            if promotes:
                product = wgmma(a, b)
                if scales_fit:  # load them while wgmma runs
                    factors = load_scales(smem.f32, scales)
                product = wait(product)
                if scales_stay_shared:
                    acc = add_scaled_by_shared(acc, product, smem.f32, scales)
                if by_block:  # all lanes have read their scales, which are part of the stage
                    cuda.syncwarp()
            else:
                acc = wait(wgmma(acc, a, b))
            if release:
                release_stage(smem.barriers, empty + stage)
            if scales_fit:
                acc = add_scaled(acc, product, factors)
            elif promotes and not by_block:
                acc = add(acc, product, float32(1))
            return acc

        @cuda.jit(device=True)
        def consume_tile(smem, output, warp, lane, stage, phase, k_blocks, tile):
            # ---- Main loop over k: all wgmmas of a warpgroup complete within a stage ----
            terms = load_terms(output.inputs, tile, warp, lane, output.n)
            warpgroup_offset = int32((warp >> 2) * (HALF_TILE_ROWS * BLOCK_K_BYTES))
            acc_0, acc_1 = zeros, zeros
            for _ in range(k_blocks):
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                offset = int32(stage * stage_bytes)
                a = weight_descriptor(smem.u8, offset + warpgroup_offset)
                b = wgmma_descriptor(smem.u8, offset + x_offset)
                scales = int32(scale_offset + stage * stage_scales + (lane & 3) * scale_pitch)
                acc_0 = multiply_stage(smem, a, b, acc_0, scales, stage, lane == 0 and not two)
                if two:
                    if silu_and_mul:
                        a = uint64(a + uint64(WEIGHT_TILE_BYTES >> 4))
                    else:
                        b = uint64(b + uint64(subtile_bytes >> 4))
                    scales = int32(scales + 4 * scale_pitch)
                    acc_1 = multiply_stage(smem, a, b, acc_1, scales, stage, lane == 0)
                stage, phase = advance(stage, phase)

            # ---- Epilogue ----
            if quantises:
                if tile.column < output.n:  # a cluster's second tile may lie beyond; the other epilogues test it, too
                    if has_row_terms:
                        acc_0, acc_1 = apply_row_terms(acc_0, terms[0]), apply_row_terms(acc_1, terms[1])
                    store_silu_and_mul(acc_0, acc_1, smem, output, warp, lane, tile)
            elif silu_and_mul:
                # There is one subtile, so `store_tile` does not store the second accumulator.
                acc_0, acc_1 = finish_gate_up(acc_0, acc_1, tile, terms)
                if stores_gate_up:  # a row's gates, and behind them its ups
                    n = output.n
                    up_tile = OutputTile(
                        tile.row, tile.rows, tile.subtile_rows, int32(tile.column + n), tile.scale, tile.group
                    )
                    gate_up = EpilogueOperands(output.second, None, int32(2 * n), None)
                    if tile.column + int32(warp >> 2) * 64 < n:
                        store_tile(smem, gate_up, warp, lane, acc_0, acc_0, tile, float32(1))
                        store_tile(smem, gate_up, warp, lane, acc_1, acc_1, up_tile, float32(1))
                acc = activate(acc_0, acc_1)
                store_tile(smem, output, warp, lane, acc, acc, tile, float32(1))
            else:
                finish_and_store(smem, output, warp, lane, acc_0, acc_1, tile, terms)
            return stage, phase

        return consume_tile

    def make_consume_smallest(sizes, subtiles):
        """Make ``consume_tile`` with the smallest wgmma N in ``sizes`` that holds the rows of a subtile."""
        largest = make_consume_tile(sizes[0], subtiles)
        if len(sizes) == 1:
            return largest
        smaller, next_size = make_consume_smallest(sizes[1:], subtiles), sizes[1]

        @cuda.jit(device=True)
        def consume_tile(smem, output, warp, lane, stage, phase, k_blocks, tile):
            if tile.subtile_rows > next_size:
                stage, phase = largest(smem, output, warp, lane, stage, phase, k_blocks, tile)
            else:
                stage, phase = smaller(smem, output, warp, lane, stage, phase, k_blocks, tile)
            return stage, phase

        return consume_tile

    consume_one = make_consume_smallest(config.mma_n, 1)
    # Rows that need two subtiles need more than half of each.
    sizes_of_two = tuple(mma_n for mma_n in config.mma_n if 2 * mma_n > subtile_m)
    consume_two = make_consume_smallest(sizes_of_two, 2) if two_subtiles else None

    # ==== The kernel ====

    @cuda.jit(device=True)
    def compute_tiles(maps, output, problem, scales, strides, source, k):
        # ---- Shared memory: typed views that begin at the same address ----
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
            for i in range(stages):
                mbarrier_init(smem.barriers, full + i, 2 if has_aux else 1)  # the TMA thread and one auxiliary warp
                mbarrier_init(smem.barriers, empty + i, CONSUMER_WARPS * cluster)
            fence_mbarrier_init()
        if cluster == 2:  # the other CTA arrives at these barriers, too
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        if not early_weight:
            griddepcontrol_wait()

        # ---- Number of tiles: a prefix sum over the groups, which stays in shared memory ----
        n = output.n
        n_tiles = int32((n + BLOCK_N - 1) >> 7)
        k_blocks = first_low = int32((k + block_k - 1) >> block_k_shift)
        if low_rank:
            k_blocks = int32(k_blocks + ((maps.rank + block_k - 1) >> block_k_shift))
        tiles = count_tiles(smem, problem, int32((n_tiles + cluster - 1) // cluster))
        if early_weight and warp != CONSUMER_WARPS:  # that warp's TMA producer waits later
            griddepcontrol_wait()

        if warp >= CONSUMER_WARPS:
            # ==== Producer warpgroup ====
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                # ---- TMA: weight, and x unless it is gathered ----
                # This thread also looks up the tiles for the consumers, which would otherwise wait for the group sizes
                # to arrive from global memory: it runs ahead of them.
                stage, phase = int32(0), uint32(1)  # the first wait for each empty barrier returns at once
                early = int32(0)  # stages whose weights have been loaded
                evict_last = createpolicy_evict_last()
                weight_policy = evict_last if keep_weight else createpolicy_evict_first()
                column_tiles = int32((n + cluster_columns - 1) // cluster_columns)
                if early_weight:
                    # Fill the ring with weights while the kernel before still runs. It may compute x and x_low, but the
                    # group sizes and the scales that `publish_tile` reads must be older: written by kernels that had
                    # completed when it allowed dependents to start. Consumers do not start on these stages before the
                    # loop below, or an auxiliary warp, adds x: the full barriers expect it, too.
                    number = first_tile()
                    while number < tiles and early < stages:
                        tile = look_up_tile(smem, problem, column_tiles, number)
                        is_single = skips_empty and tile.rows <= tile.subtile_rows
                        num_bytes = int32(tma_bytes - subtile_bytes) if is_single else int32(tma_bytes)
                        publish_tile(smem, scales, tile, early)
                        for k_block in range(min(k_blocks, int32(stages - early))):
                            _, map_weight, at_k = operands_of(maps, k_block, first_low)
                            mbarrier_arrive_expect_tx(smem.barriers, full + early, num_bytes)
                            load_weight(smem, map_weight, tile, early, at_k, n, weight_policy)
                            early = int32(early + 1)
                        number = next_tile(number)
                    griddepcontrol_wait()
                number = first_tile()
                while number < tiles:
                    tile = look_up_tile(smem, problem, column_tiles, number)  # before the wait, which hides its latency
                    # An early stage was empty, and must not be waited for, here and below: with gathered rows, which
                    # other warps add, consumers may have released it since, and a wait for parity 1 would not return.
                    if early == 0:
                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                        publish_tile(smem, scales, tile, stage)
                    is_single = skips_empty and tile.rows <= tile.subtile_rows
                    num_bytes = int32(tma_bytes - subtile_bytes) if is_single else int32(tma_bytes)
                    row = tile.row
                    # In a cluster, each CTA loads half of the rows of x and multicasts them to both. They may arrive
                    # before the other CTA expects their bytes: its own arrival is pending, so the phase does not end.
                    if cluster == 2:
                        rank = int32(cluster_ctarank())
                        row = int32(row + rank * (tile.subtile_rows if two_subtiles else box_rows))
                        multicast_offset = int32(x_offset + rank * (box_rows * BLOCK_K_BYTES))
                    for k_block in range(k_blocks):
                        map_x, map_weight, at_k = operands_of(maps, k_block, first_low)
                        offset, barrier = int32(stage * stage_bytes), full + stage
                        if early > 0:
                            early = int32(early - 1)
                        else:
                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                            if allows_early:
                                allow_dependents(stage, phase)
                            mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)
                            load_weight(smem, map_weight, tile, stage, at_k, n, weight_policy)
                        if cluster == 2:
                            to = int32(offset + multicast_offset)
                            tma_load_2d_multicast_hint(
                                smem.u8, to, map_x, 0, at_k, row, smem.barriers, barrier, CLUSTER_MASK, evict_last
                            )
                        elif not gather:
                            to = offset + x_offset
                            tma_load_2d_hint(smem.u8, to, map_x, 0, at_k, row, smem.barriers, barrier, evict_last)
                            if two_subtiles and not is_single:
                                to, second = int32(to + subtile_bytes), int32(row + tile.subtile_rows)
                                tma_load_2d_hint(
                                    smem.u8, to, map_x, 0, at_k, second, smem.barriers, barrier, evict_last
                                )
                        stage, phase = advance(stage, phase)
                    number = next_tile(number)
                griddepcontrol_launch_dependents()

            if has_aux and warp > CONSUMER_WARPS:
                # ---- Auxiliary warps: each adds block scales and gathered rows of x for every third k block ----
                # A scale is the product of the row's and the weight block's, for each accumulator: of two subtiles,
                # which differ in x, or of gate and up, which differ in weight. They are ordered as a consumer thread
                # needs them; see `SharedMemoryLayout.scale_pitch`.
                aux_warp = warp - CONSUMER_WARPS - 1
                stage, phase = int32(0), uint32(1)
                skip = int32(aux_warp)  # k blocks, counted across tiles, before this warp's next one
                if gather:
                    indices = int32(row_index_offset + aux_warp * row_indices)
                    x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
                    source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
                x_scales = cuda.local.array(lane_scales, float32)
                weight_scales = cuda.local.array(weight_tiles, float32)
                number = first_tile()
                while number < tiles:
                    tile = look_up_tile(smem, problem, int32((n_tiles + cluster - 1) // cluster), number)
                    # The last tile of a cluster's second CTA may lie beyond the weight: clamp it.
                    n_tile, weight_rows = min(tile.n_tile, n_tiles - 1), strides.weight_rows
                    blocks = weight_tiles * n_tiles
                    weight_index = find_weight_scale(tile.group, n_tile, blocks, k_blocks, weight_rows)
                    x_index = int64(tile.row + lane) * strides.row + tile.group * strides.group
                    if gather:
                        load_row_indices(smem, indices, lane, source, tile)
                    for k_block in range(k_blocks):
                        if skip == 0:
                            # Issue all global loads before waiting for the stage, so that their latency is hidden.
                            for p in range(weight_tiles if by_block else 0):  # up lies n_tiles tiles behind gate
                                index = weight_index + p * n_tiles * weight_scale_step(k_blocks)
                                weight_scales[p] = load_weight_scale(scales.weight, index, k_block, weight_rows)
                            for p in range(m_subtiles if by_block else 0):
                                for i in range(lane_rows):
                                    t = int32(lane + 32 * i)
                                    row = int32(p * tile.subtile_rows + t)
                                    valid = t < tile.subtile_rows and row < tile.rows
                                    index = x_index + int64(p * tile.subtile_rows + 32 * i) * strides.row
                                    if gather:
                                        x_row = smem.i32[uint32(indices + p * row_index_pitch + index_slot(t))]
                                        valid, index = valid and x_row >= 0, int64(x_row) * strides.row
                                    index += x_scale_offset(k_block, strides.k_block)
                                    x_scale = load_x_scale(scales.x, index, k_block) if valid else float32(0)
                                    x_scales[lane_rows * p + i] = x_scale
                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                            if gather:
                                copy_rows(smem, indices, lane, stage, k_block, source, tile)
                            for p in range(scale_accumulators):
                                for i in range(lane_rows):
                                    t = int32(lane + 32 * i)
                                    quarter = int32(4 * p + ((t >> 1) & 3))
                                    offset = int32(scale_offset + stage * stage_scales + quarter * scale_pitch)
                                    if t < subtile_m:
                                        x_scale = x_scales[lane_rows * (p % m_subtiles) + i]
                                        scale = x_scale * weight_scales[p % weight_tiles]
                                        smem.f32[uint32(offset + (t >> 3) * 2 + (t & 1))] = scale
                            if gather:
                                wait_rows()
                            cuda.syncwarp()
                            if lane == 0:
                                mbarrier_arrive(smem.barriers, full + stage)
                        skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                        stage, phase = advance(stage, phase)
                    number = next_tile(number)
        else:
            # ==== Consumer warpgroups ====
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            # Tell the compiler which values are the same in a warp.
            u8, barriers = to_uniform_array(smem.u8), to_uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, to_uniform_array(smem.f32), barriers)
            warp = to_uniform(warp)
            number = first_tile()
            while number < tiles:
                stage, phase = to_uniform(stage), uint32(to_uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, info = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # all lanes have read the description before lane 0 releases the stage
                output_tile = OutputTile(
                    to_uniform(row),
                    to_uniform(int32(rows & 0xFFFF)),
                    to_uniform(int32(rows >> 16)),
                    column,
                    int_as_float(info) if scale_in_tile else float32(1),
                    info,
                )
                if two_subtiles and output_tile.rows > output_tile.subtile_rows:
                    stage, phase = consume_two(smem, output, warp, lane, stage, phase, k_blocks, output_tile)
                else:
                    stage, phase = consume_one(smem, output, warp, lane, stage, phase, k_blocks, output_tile)
                number = next_tile(number)

        if cluster == 2:  # the other CTA may still multicast into this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    # ==== Entry points, with and without a second pair of operands and the operands of the epilogue ====

    if low_rank:

        @cuda.jit
        def grouped_gemm(
            map_x,
            map_weight,
            y,
            second,
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
            bias,
            row_weights,
            scatter_indices,
            y_rows,
            map_x_low,
            map_weight_low,
            rank,
        ):
            inputs = EpilogueInputs(
                x_scale, weight_scale, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows
            )
            output = EpilogueOperands(y, second, n, inputs)
            problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
            source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << element_shift))
            strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_tiles))
            maps = OperandMaps(map_x, map_weight, map_x_low, map_weight_low, rank)
            compute_tiles(maps, output, problem, scales, strides, source, k)

        return grouped_gemm, layout.bytes

    if config.epilogue_loads:

        @cuda.jit
        def grouped_gemm(
            map_x,
            map_weight,
            y,
            second,
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
            bias,
            row_weights,
            scatter_indices,
            y_rows,
        ):
            inputs = EpilogueInputs(
                x_scale, weight_scale, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows
            )
            output = EpilogueOperands(y, second, n, inputs)
            problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
            source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << element_shift))
            strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_tiles))
            maps = OperandMaps(map_x, map_weight, None, None, None)
            compute_tiles(maps, output, problem, scales, strides, source, k)

        return grouped_gemm, layout.bytes

    @cuda.jit
    def grouped_gemm(
        map_x,
        map_weight,
        y,
        second,
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
        output = EpilogueOperands(y, second, n, None)
        problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
        source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << element_shift))
        strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_tiles))
        maps = OperandMaps(map_x, map_weight, None, None, None)
        compute_tiles(maps, output, problem, scales, strides, source, k)

    return grouped_gemm, layout.bytes
