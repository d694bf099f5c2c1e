"""One persistent kernel: rows are sent, both GEMMs computed, and their rows sent back, in the order of the experts.

Every CTA has 12 warps:

- Warps 0 to 7, two consumer warpgroups, multiply tiles as in ``grouped_gemm/block_scaled/kernel.py``: 128 rows of x by
  256 rows of weight, gate and up of 128 columns in the first GEMM, 256 columns in the second. The first GEMM's epilogue
  stores silu(gate) * up in FP8 or bfloat16, as rows and weights are, the second one's stores rows in bfloat16 at the
  ranks that have their tokens.
- One thread of warp 8 takes tiles, describes them to the other warps, and issues the TMA loads.
- Warps 9 and 10 write the factors of 64 rows to every stage (FP8), and where the rows of the second GEMM belong. They
  also count what the consumers have stored: a count is a fence, for which the consumers would have to wait.
- Warp 11 sends this rank's rows, in the order of the experts, by bulk copies through shared memory. That of the first
  CTA then waits for the rows that come back.

A tile of the first GEMM is loaded when all ranks have sent their rows for its expert, one of the second when all tiles
of the first one for its expert are stored. All tiles of the first GEMM come before those of the second. A CTA that is
ready to load another tile takes the next one, so its tiles are in ascending order, and the tile with the lowest number
that is not done can always be done: no wait is in vain. Which CTA computes a tile depends on time, the results do not.
A wait that lasts too long aborts all ranks, and then every wait ends, so that the kernel does, too.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG
from moe_numba.expert_parallel.common.timeout import EXPERT_ROWS, FIRST_GEMM, ROWS_BACK, abort
from moe_numba.grouped_gemm.block_scaled.config import (
    BLOCK_M,
    BOX_ROWS,
    BUFFER_COLUMNS,
    FACTOR_WARPS,
    ROW_BYTES,
    BlockScaledConfig,
    BlockScaledLayout,
)
from moe_numba.grouped_gemm.block_scaled.epilogue import largest_of_quad, make_activate, write_fp8
from moe_numba.grouped_gemm.common.block_scales import make_load_four
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.scheduler import (
    Problem,
    divide,
    find_group,
    make_count_tiles,
    make_group_rows,
    num_tiles,
)
from moe_numba.moe_layer.expert_parallel.one_kernel.counts import CONTEXT, wait_count, wait_too
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import EXPECTED, EXPECTED_BACK, WARP, Sizes
from moe_numba.ptx.accumulators import make_fma_blocks, make_for_each_chunk
from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_approx
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_volatile_s32,
    red_add_relaxed_gpu_s32,
    red_add_release_sys_s32,
)
from moe_numba.ptx.conversions import FP8_MAX
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_acq_rel_gpu, fence_proxy_async
from moe_numba.ptx.matrix import stmatrix_rows
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_test_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_shared_s32x4,
    pointer_from_address,
    st_global_s32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import createpolicy_evict_last, tma_load_2d_hint, tma_load_3d_hint
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.compile import TENSOR_MAP

BLOCK_N, COLUMNS, STAGES = 2 * FP8_SCALE_BLOCK, FP8_SCALE_BLOCK, 4  # rows of weight; columns of an accumulator
BOX_BYTES, HALF_BYTES = BOX_ROWS * BLOCK_K_BYTES, COLUMNS * BLOCK_K_BYTES
MOVER, PIECE_BYTES = 11, 8192  # of a row that the mover sends at a time, at most
NO_TILE = -1  # instead of an expert
bulk_wait, bulk_wait_read = make_bulk_wait_group(0), make_bulk_wait_group_read(0)
SIGNATURE = (
    *CONTEXT,
    *[TENSOR_MAP] * 4,
    *("int32*", "float32*", "float32*", "float32*", "float32*"),  # activated and its scales; of rows, w13, w2
    *("int32*", "int32*", "int32*"),  # lengths, starts, done
    *("int32*", "int32*", "int32*", "int32*", "int32*"),  # of this rank's tokens
)


def columns_tiles(sizes: Sizes) -> int:
    """Return the tiles of columns of the second GEMM: pieces in which a row comes back."""
    return -(-sizes.hidden // BLOCK_N)


def make_one_kernel(sizes: Sizes, intermediate: int):
    """Make the kernel, for CTAs that are all resident."""
    return make_kernel(sizes, intermediate)[0]


@cache
def make_kernel(sizes: Sizes, intermediate: int):
    """Make the kernel; return it and its dynamic shared memory in bytes."""
    ranks, experts, hidden = sizes.ranks, sizes.experts, sizes.hidden
    row_words, scale_words, assignments, back_words = sizes.row_words, sizes.scale_words, sizes.assignments, hidden // 2
    rows_offset, scales_offset, origins_offset, capacity = sizes.rows, sizes.scales, sizes.origins, sizes.capacity
    arrived, returned, back = sizes.arrived, sizes.returned, sizes.back
    config = BlockScaledConfig(BLOCK_N, STAGES, silu_and_mul=True, cluster_size=1, max_groups=experts, keep_weight=True)
    layout = BlockScaledLayout(config)
    stage_bytes, x_offset, full, empty = layout.stage_bytes, layout.x_offset, layout.full, layout.empty
    tile_info_offset, first_tile = layout.tile_info_offset, layout.first_tile_offset
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors
    epilogue_offset, warp_bytes, half_step = layout.epilogue_offset, layout.epilogue_warp_bytes, HALF_BYTES >> 4
    # Behind the GEMM's: for each row of a tile its address and rank; barriers of the stores, of the mover and, for each
    # stage, of the description of a tile; the mover's row.
    destinations = -(-layout.bytes // 16) * 4
    stored = destinations // 2 + BLOCK_M * 2
    mover_barrier, described = stored + 1, stored + 2
    staging, row_bytes = -(-8 * (described + STAGES) // 128) * 128, 4 * row_words
    pieces = -(-row_bytes // PIECE_BYTES)
    piece_bytes = -(-row_bytes // (16 * pieces)) * 16
    shared_bytes = staging + piece_bytes

    # Of the first GEMM and of the second one: columns of a tile, tiles of columns, blocks of k, and of scales.
    n_tiles_1, n_tiles_2 = intermediate // COLUMNS, columns_tiles(sizes)
    is_fp8 = scale_words > 0
    block_k = BLOCK_K_BYTES if is_fp8 else BLOCK_K_BYTES // 2  # elements
    k_blocks_1, k_blocks_2 = hidden // block_k, intermediate // block_k
    n_blocks_1, n_blocks_2 = 2 * intermediate // FP8_SCALE_BLOCK, hidden // FP8_SCALE_BLOCK
    load_four = make_load_four(False, k_blocks_1 % 4 == 0 and k_blocks_2 % 4 == 0)

    zeros = (np.float32(0),) * (COLUMNS // 2)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(56), make_setmaxnreg_inc(224)
    count_tiles, group_rows, advance = (
        make_count_tiles(config, layout),
        make_group_rows("lengths"),
        make_advance(STAGES),
    )
    wait = make_wgmma_wait(COLUMNS, 0)
    if is_fp8:
        wgmma = make_wgmma_tile(COLUMNS, "e4m3", overwrite=True)
    else:
        wgmma = make_wgmma_tile(COLUMNS, "bf16", accumulate=True)
    fma, activate = make_fma_blocks(COLUMNS, COLUMNS), make_activate()

    @cuda.jit(device=True)
    def look_up(smem, problem, row_tiles, tile):
        """Return a tile's expert, whether it is of the second GEMM, its rows, and its tile of columns."""
        tiles_1 = int32(row_tiles * n_tiles_1)
        is_second = tile >= tiles_1
        n_tiles = int32(n_tiles_2) if is_second else int32(n_tiles_1)
        number = int32(tile - tiles_1) if is_second else tile
        g = find_group(smem.i32, first_tile, problem.groups, divide(number, n_tiles))
        first, count = group_rows(problem, g)
        of_group = num_tiles(count, BLOCK_M)
        number = int32(number - smem.i32[uint32(first_tile + g)] * n_tiles)
        n_tile = divide(number, of_group)
        begin = int32(int32(number - n_tile * of_group) * BLOCK_M)
        return g, is_second, int32(first + begin), int32(min(count - begin, BLOCK_M)), n_tile

    @cuda.jit(device=True)
    def counter_of_rows(ctx, done, lengths, g, is_second):
        """Return what counts a tile's rows of x: pointer, index, expected value, and the code if it does not come."""
        counter, at, expected, code = ctx.local, int32(arrived + g), ctx.state[EXPECTED + g], int32(EXPERT_ROWS)
        if is_second:
            tiles = int32(num_tiles(lengths[g], BLOCK_M) * n_tiles_1)
            counter, at, expected, code = done, g, int32(FACTOR_WARPS * tiles), int32(FIRST_GEMM)
        return counter, at, expected, code

    @cuda.jit(device=True)
    def describe_tile(smem, stage, row, rows, column, g):
        """Describe a tile in the slot of its first stage; ``g`` counts the experts of both GEMMs."""
        st_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage), row, rows, column, g)
        mbarrier_arrive(smem.barriers, described + stage)

    @cuda.jit(device=True)
    def next_tile(smem, stage, phases):
        """Wait until a tile is described; return its rows, column and expert, and the phases of all stages."""
        mbarrier_wait_parity(smem.barriers, described + stage, (phases >> uint32(stage)) & uint32(1))
        row, rows, column, g = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
        return row, rows, column, g, uint32(phases ^ (uint32(1) << uint32(stage)))

    @cuda.jit(device=True)
    def arrived_tile(smem, stage, phase):
        """Wait until the first stage of a tile is full; return the tile's rows, column and expert."""
        mbarrier_wait_parity(smem.barriers, full + stage, phase)
        row, rows, column, g = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
        return uniform(row), uniform(rows), uniform(column), uniform(g)

    @cuda.jit(device=True)
    def publish_factors(smem, lane, row, stage, phase, x_0, x_1, a, b):
        """Write the factors of two rows to a stage as soon as it is empty, and arrive at its full barrier."""
        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
        if is_fp8:
            to = int32(factor_offset + stage * stage_factors + 4 * row)
            st_shared_s32x4(smem.i32, to, float_as_int(x_0 * a), float_as_int(x_0 * b), int32(0), int32(0))
            to = int32(to + 4 * 32)
            st_shared_s32x4(smem.i32, to, float_as_int(x_1 * a), float_as_int(x_1 * b), int32(0), int32(0))
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(smem.barriers, full + stage)
        return advance(stage, phase)

    @cuda.jit(device=True)
    def rank_and_expert(ctx, pair):
        """Return expert and rank of the n-th pair: all ranks' first experts, from the next rank on, then the others."""
        return int32(pair // ranks), int32((ctx.rank + 1 + pair % ranks) % ranks)

    @cuda.jit(device=True)
    def send_rows(ctx, smem, x, scales, tokens_of_rows, first_rows, places):
        """Send every n-th of this rank's rows, for all ranks' first experts, then for their second ones, and so on."""
        lane, phase = int32(cuda.threadIdx.x & 31), uint32(0)
        row = int32(cuda.blockIdx.x)
        for first_pair in range(0, experts * ranks, WARP):
            # Each lane reads where the rows of one rank and expert begin, and where they belong.
            e, d = rank_and_expert(ctx, int32(first_pair + lane))
            g = int32(d * experts + e)
            lane_first, lane_count, lane_place = int32(0), int32(0), int32(0)
            if first_pair + lane < experts * ranks:
                lane_first, lane_place = first_rows[g], places[g]
                lane_count = int32(first_rows[g + 1] - lane_first)
            for i in range(WARP):
                first, count = cuda.shfl_sync(FULL_MASK, lane_first, i), cuda.shfl_sync(FULL_MASK, lane_count, i)
                place_of, sent = cuda.shfl_sync(FULL_MASK, lane_place, i), int32(0)
                e, d = rank_and_expert(ctx, int32(first_pair + i))
                remote = pointer_from_address(ctx.peers[d], ctx.local)
                while row < count:
                    token, place = int64(tokens_of_rows[first + row]), int64(place_of + row)
                    for piece in range(pieces):
                        word = int32(piece * (piece_bytes // 4))
                        num_bytes = int32(min(piece_bytes, row_bytes - piece * piece_bytes))
                        if lane == 0:
                            bulk_wait_read()  # the piece before has left the staging buffer
                            mbarrier_arrive_expect_tx(smem.barriers, mover_barrier, num_bytes)
                            from_ = token * row_words + word
                            bulk_load(smem.u8, staging, x, from_, num_bytes, smem.barriers, mover_barrier)
                        if piece == 0:
                            for j in range(lane, scale_words, WARP):
                                remote[scales_offset + place * scale_words + j] = scales[token * scale_words + j]
                        if lane == 0:
                            if piece == 0:
                                remote[origins_offset + place] = int32(ctx.rank * assignments + first + row)
                            mbarrier_wait_parity(smem.barriers, mover_barrier, phase)
                            bulk_store(remote, rows_offset + place * row_words + word, smem.u8, staging, num_bytes)
                            bulk_commit_group()
                        phase = uint32(phase ^ uint32(1))
                    row, sent = int32(row + cuda.gridDim.x), int32(sent + 1)
                row = int32(row - count)
                if lane == 0 and sent > 0:
                    bulk_wait()  # the rows are written
                    fence_proxy_async()
                cuda.syncwarp()
                if lane == 0 and sent > 0:
                    red_add_release_sys_s32(remote, arrived + e, sent)

    @cuda.jit(device=True)
    def store_chunk(first_value, values, smem, activated, lane, buffer, row, rows, column):
        """Store 64 columns of a warp's 16 rows of silu(gate) * up in bfloat16."""
        t, vector = int32(lane & 15), int32(lane & 7)
        cuda.syncwarp()  # all lanes have read the columns before
        stmatrix_rows(smem.u8, int32(buffer + t * ROW_BYTES + (((t & 7) ^ (lane >> 4)) << 4)), values)
        cuda.syncwarp()
        for i in range(4):
            t = int32(4 * i + (lane >> 3))
            a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
            if t < rows:
                at = int64(row + t) * (intermediate // 2) + (column >> 1) + first_value + 4 * vector
                st_global_s32x4(activated, at, a, b, c, d)

    store_in_bf16 = make_for_each_chunk(COLUMNS // 2, BUFFER_COLUMNS // 2, store_chunk)

    @cuda.jit(device=True)
    def store_in_fp8(smem, activated, activated_scale, lane, buffer, acc, acc_1, row, rows, column):
        """Store silu(gate) * up of a warp's 16 rows and 128 columns in FP8, with one scale for each row."""
        values, largest_0, largest_1 = activate(acc, acc_1)
        scale_0 = max(largest_of_quad(largest_0), float32(1e-10)) * float32(1 / FP8_MAX)
        scale_1 = max(largest_of_quad(largest_1), float32(1e-10)) * float32(1 / FP8_MAX)
        own, vector = int32(lane >> 2), int32(lane & 7)
        t = int32(own + 8 * (lane & 1))
        cuda.syncwarp()  # all lanes have read the rows before
        to, xor = int32(buffer + t * ROW_BYTES), int32((t & 7) << 4)
        write_fp8(values, smem, to, xor, rcp_approx(scale_0), rcp_approx(scale_1), lane)
        cuda.syncwarp()
        for i in range(4):
            t = int32(4 * i + (lane >> 3))
            a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
            if t < rows:
                at = int64(row + t) * (intermediate // 4) + (column >> 2) + 4 * vector
                st_global_s32x4(activated, at, a, b, c, d)
        scale_at = int64(row + own) * k_blocks_2 + (column >> 7)
        if (lane & 3) == 0 and own < rows:
            activated_scale[scale_at] = scale_0
        if (lane & 3) == 0 and own + 8 < rows:
            activated_scale[scale_at + 8 * k_blocks_2] = scale_1

    @cuda.jit(device=True)
    def send_chunk(first_value, values, ctx, smem, lane, buffer, own_row, rows, column):
        """Store 64 columns of a warp's 16 rows at the ranks that have their tokens; the buffer is the warp's own."""
        t = int32(lane & 15)
        cuda.syncwarp()  # all lanes have read the columns before
        stmatrix_rows(smem.u8, int32(buffer + t * ROW_BYTES + (((t & 7) ^ (lane >> 4)) << 4)), values)
        cuda.syncwarp()
        vector = int32(lane & 7)
        column = int32(column + 2 * first_value + 8 * vector)
        for i in range(4):
            t = int32(4 * i + (lane >> 3))
            a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
            low, high, _, _ = ld_shared_s32x4(smem.i32, int32(destinations + 4 * (own_row + t)))
            if t < rows and column < hidden:
                remote = pointer_from_address(uint64(uint32(high)) << uint64(32) | uint64(uint32(low)), ctx.local)
                st_global_s32x4(remote, column >> 1, a, b, c, d)

    send_half = make_for_each_chunk(COLUMNS // 2, BUFFER_COLUMNS // 2, send_chunk)

    @cuda.jit(device=True)
    def write_destination(ctx, smem, t, origin):
        """Write for row ``t`` of a tile where its result belongs: the address, and the rank, -1 without a row."""
        source, low, high = int32(-1), int32(0), int32(0)
        if (origin >= 0) & (origin < capacity):  # after an abort it may be any number
            source = int32(origin // assignments)
            place = int64(origin - source * assignments) * back_words
            address = uint64(ctx.peers[source]) + uint64(4 * (back + place))
            low, high = int32(uint32(address)), int32(uint32(address >> uint64(32)))
        st_shared_s32x4(smem.i32, int32(destinations + 4 * t), low, high, source, int32(0))

    @cuda.jit(device=True)
    def count_stored(ctx, smem, done, phase, lane, told, g, own_row):
        """Wait until a tile is stored, of the first GEMM or of the second one (``told`` 1 or 2), and count its rows."""
        mbarrier_wait_parity(smem.barriers, stored, phase)
        if told == 1:
            if lane == 0:
                fence_acq_rel_gpu()
                red_add_relaxed_gpu_s32(done, g, int32(1))
        else:
            _, _, source_0, _ = ld_shared_s32x4(smem.i32, int32(destinations + 4 * own_row))
            _, _, source_1, _ = ld_shared_s32x4(smem.i32, int32(destinations + 4 * (own_row + 32)))
            for s in range(ranks):
                stored_rows = cuda.popc(cuda.ballot_sync(FULL_MASK, source_0 == s))
                stored_rows += cuda.popc(cuda.ballot_sync(FULL_MASK, source_1 == s))
                if lane == 0 and stored_rows != 0:
                    remote = pointer_from_address(ctx.peers[s], ctx.local)
                    red_add_release_sys_s32(remote, returned, int32(stored_rows))
        return uint32(phase ^ uint32(1))

    @cuda.jit
    def one_kernel(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        map_rows,
        map_w13,
        map_activated,
        map_w2,
        activated,
        activated_scale,
        x_scale,
        w13_scale,
        w2_scale,
        lengths,
        starts,
        done,
        x,
        scales,
        tokens_of_rows,
        first_rows,
        places,
    ):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
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
            for stage in range(STAGES):
                mbarrier_init(smem.barriers, full + stage, 1 + FACTOR_WARPS)  # the TMA thread and the factors' warps
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS)
                mbarrier_init(smem.barriers, described + stage, 1)
            mbarrier_init(smem.barriers, stored, CONSUMER_WARPS)
            mbarrier_init(smem.barriers, mover_barrier, 1)
            fence_mbarrier_init()
        griddepcontrol_wait()

        # ---- Tiles of rows: an exclusive prefix sum over the experts, in shared memory ----
        problem = Problem(lengths, starts, int32(experts), int32(capacity), int32(0))
        row_tiles = count_tiles(smem, problem, int32(1))
        cuda.syncthreads()

        if warp >= CONSUMER_WARPS:
            # ==== Producer warpgroup ====
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):
                # ---- TMA ----
                stage, phase, policy = int32(0), uint32(1), createpolicy_evict_last()
                tile, tiles = int32(cuda.blockIdx.x), int32(row_tiles * (n_tiles_1 + n_tiles_2))
                while tile < tiles:
                    g, is_second, row, rows, n_tile = look_up(smem, problem, row_tiles, tile)
                    column = int32(n_tile * (BLOCK_N if is_second else COLUMNS))
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    # Before the wait: the warps of factors may have to count what it waits for.
                    describe_tile(smem, stage, row, rows, column, int32(g + experts) if is_second else g)
                    counter, place, expected, code = counter_of_rows(ctx, done, lengths, g, is_second)
                    wait_count(ctx, counter, place, expected, code, g)
                    fence_proxy_async()  # TMA reads what other threads have stored
                    two_boxes, k_blocks = rows > BOX_ROWS, int32(k_blocks_2) if is_second else int32(k_blocks_1)
                    second = int32(column + (COLUMNS if is_second else intermediate))
                    tma_bytes = int32(x_offset + 2 * BOX_BYTES) if two_boxes else int32(x_offset + BOX_BYTES)
                    for k_block in range(k_blocks):
                        k_at, offset = int32(k_block * block_k), int32(stage * stage_bytes)
                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                        mbarrier_arrive_expect_tx(smem.barriers, full + stage, tma_bytes)
                        half, to, to_1 = int32(offset + HALF_BYTES), int32(offset + x_offset), int32(row + BOX_ROWS)
                        end = smem.barriers, full + stage, policy
                        if is_second:
                            tma_load_3d_hint(smem.u8, offset, map_w2, 0, k_at, column, g, *end)
                            tma_load_3d_hint(smem.u8, half, map_w2, 0, k_at, second, g, *end)
                            tma_load_2d_hint(smem.u8, to, map_activated, 0, k_at, row, *end)
                            if two_boxes:
                                tma_load_2d_hint(smem.u8, int32(to + BOX_BYTES), map_activated, 0, k_at, to_1, *end)
                        else:
                            tma_load_3d_hint(smem.u8, offset, map_w13, 0, k_at, column, g, *end)
                            tma_load_3d_hint(smem.u8, half, map_w13, 0, k_at, second, g, *end)
                            tma_load_2d_hint(smem.u8, to, map_rows, 0, k_at, row, *end)
                            if two_boxes:
                                tma_load_2d_hint(smem.u8, int32(to + BOX_BYTES), map_rows, 0, k_at, to_1, *end)
                        stage, phase = advance(stage, phase)
                    tile = int32(cuda.gridDim.x + atom_add_relaxed_gpu_s32(done, experts, int32(1)))
                mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                describe_tile(smem, stage, int32(0), int32(0), int32(0), int32(NO_TILE))
                mbarrier_arrive(smem.barriers, full + stage)
                griddepcontrol_launch_dependents()

            if (warp > CONSUMER_WARPS) & (warp <= CONSUMER_WARPS + FACTOR_WARPS):
                # ---- Factors: for each row of x and each half of the tile the product of the two scales ----
                # A tile is counted before the last factors of the next one are there, so that the consumers do not
                # finish that, too; the last tile of the first GEMM at once, since the next may wait for it.
                zero, one = (float32(0), float32(0), float32(0), float32(0)), int64(1)
                own_row = int32((warp - CONSUMER_WARPS - 1) * BOX_ROWS + lane)
                stage, phase, phases = int32(0), uint32(1), uint32(0)
                told, told_g, told_phase = int32(0), int32(0), uint32(0)
                row, rows, column, g, phases = next_tile(smem, stage, phases)
                while g != NO_TILE:
                    is_second = g >= experts
                    g = int32(g - experts) if is_second else g
                    if is_second and told == 1:
                        told_phase = count_stored(ctx, smem, done, told_phase, lane, told, told_g, own_row)
                        told = int32(0)
                    counter, place, expected, _ = counter_of_rows(ctx, done, lengths, g, is_second)
                    wait_too(ctx, counter, place, expected)
                    cuda.syncwarp()
                    k_blocks = int32(k_blocks_2) if is_second else int32(k_blocks_1)
                    of_x, of_weight, block = x_scale, w13_scale, int32(column // FP8_SCALE_BLOCK)
                    if is_second:
                        of_x, of_weight = activated_scale, w2_scale
                        w_0 = int64(int32(g * n_blocks_2 + block)) * k_blocks
                        w_1 = int64(int32(g * n_blocks_2 + min(block + 1, n_blocks_2 - 1))) * k_blocks
                    else:
                        w_0 = int64(int32(g * n_blocks_1 + block)) * k_blocks
                        w_1 = w_0 + int64(n_blocks_1 // 2) * k_blocks
                    x_0 = int64(row + own_row) * k_blocks
                    x_1 = x_0 + int64(32) * k_blocks
                    valid_0, valid_1, origin_0, origin_1 = own_row < rows, own_row + 32 < rows, int32(-1), int32(-1)
                    if is_second and valid_0:
                        origin_0 = local[origins_offset + row + own_row]
                    if is_second and valid_1:
                        origin_1 = local[origins_offset + row + own_row + 32]
                    for k_block in range(0, k_blocks, 4):
                        count, at, s, t = int32(k_blocks - k_block), int64(k_block), zero, zero
                        a, b = zero, zero
                        if is_fp8:
                            if valid_0:
                                s = load_four(of_x, x_0 + at, one, count)
                            if valid_1:
                                t = load_four(of_x, x_1 + at, one, count)
                            a = load_four(of_weight, w_0 + at, one, count)
                            b = load_four(of_weight, w_1 + at, one, count)
                        if count <= 4:  # the last factors
                            if told != 0:
                                before = lane, told, told_g, own_row
                                told_phase = count_stored(ctx, smem, done, told_phase, *before)
                            cuda.syncwarp()
                            if is_second:
                                write_destination(ctx, smem, own_row, origin_0)
                                write_destination(ctx, smem, int32(own_row + 32), origin_1)
                        stage, phase = publish_factors(smem, lane, own_row, stage, phase, s[0], t[0], a[0], b[0])
                        if count > 1:
                            stage, phase = publish_factors(smem, lane, own_row, stage, phase, s[1], t[1], a[1], b[1])
                        if count > 2:
                            stage, phase = publish_factors(smem, lane, own_row, stage, phase, s[2], t[2], a[2], b[2])
                        if count > 3:
                            stage, phase = publish_factors(smem, lane, own_row, stage, phase, s[3], t[3], a[3], b[3])
                    told, told_g = int32(2) if is_second else int32(1), g
                    row, rows, column, g, phases = next_tile(smem, stage, phases)
                if lane == 0:
                    mbarrier_arrive(smem.barriers, full + stage)
                if told != 0:
                    count_stored(ctx, smem, done, told_phase, lane, told, told_g, own_row)

            if warp == MOVER:
                # ---- Rows leave; those of this rank's tokens come back ----
                if ld_volatile_s32(local, ABORT_FLAG) == 0:  # otherwise counts may be missing
                    send_rows(ctx, smem, x, scales, tokens_of_rows, first_rows, places)
                aborted = int32(0)
                if cuda.blockIdx.x == 0 and lane == 0:
                    wait_count(ctx, local, returned, state[EXPECTED_BACK], ROWS_BACK, int32(-1))
                    aborted = ld_volatile_s32(local, ABORT_FLAG)
                if cuda.shfl_sync(FULL_MASK, aborted, 0) != 0:
                    if lane == 0:
                        abort(ctx, int32(0), int32(0), int32(0), int32(0), int32(0))  # adopt the reason
                    for i in range(int64(lane), int64(assignments) * back_words, WARP):
                        local[back + i] = int32(-1)  # NaN
                if lane == 0:
                    bulk_wait()
        else:
            # ==== Consumer warpgroups ====
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, uniform_array(smem.f32), barriers)
            warp = uniform(warp)
            row, rows, column, g = arrived_tile(smem, stage, phase)
            while g != NO_TILE:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                is_second = g >= experts
                # If a rank has aborted, the wait for this tile's rows may have been in vain.
                aborted = ld_volatile_s32(local, ABORT_FLAG) != 0
                warpgroup, own_row = int32(warp >> 2), int32(warp * 16)
                k_blocks = int32(k_blocks_2) if is_second else int32(k_blocks_1)
                if rows > warpgroup * BOX_ROWS:
                    # ---- Main loop over k: 64 rows of x times the tile's weights, in two halves ----
                    x_start, thread_row = int32(x_offset + warpgroup * BOX_BYTES), int32(own_row + (lane >> 2))
                    acc, acc_1, product = zeros, zeros, zeros  # the last one for FP8
                    x_0, weight_0 = wgmma_descriptor(smem.u8, x_start), wgmma_descriptor(smem.u8, int32(0))
                    ready = True  # the tile's first stage has been waited for
                    for _ in range(k_blocks):
                        if not ready:
                            mbarrier_wait_parity(smem.barriers, full + stage, phase)
                        if is_fp8:
                            factors = int32(factor_offset + stage * stage_factors + 4 * thread_row)
                            a_0, a_1, _, _ = ld_shared_s32x4(smem.i32, factors)
                            b_0, b_1, _, _ = ld_shared_s32x4(smem.i32, int32(factors + 4 * 8))
                            a, b = (int_as_float(a_0), int_as_float(a_1)), (int_as_float(b_0), int_as_float(b_1))
                        step = uint64(uint32(stage) * uint32(stage_bytes >> 4))
                        x_tile, weight_tile = uint64(x_0 + step), uint64(weight_0 + step)
                        weight_tile_1 = uint64(weight_tile + uint64(half_step))
                        if is_fp8:
                            product = wait(wgmma(product, x_tile, weight_tile))
                            acc = fma(acc, product, (a[0], b[0]))
                            product = wait(wgmma(product, x_tile, weight_tile_1))
                        else:
                            first, second = wgmma(acc, x_tile, weight_tile), wgmma(acc_1, x_tile, weight_tile_1)
                            acc, acc_1 = wait(first), wait(second)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(smem.barriers, empty + stage)
                        stage, phase = advance(stage, phase)
                        # The result arrives during the FFMAs; after the last block of k it is not used.
                        ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)
                        if is_fp8:
                            acc_1 = fma(acc_1, product, (a[1], b[1]))

                    # ---- Epilogue: the warp's 16 rows ----
                    y_rows, buffer = int32(rows - own_row), int32(epilogue_offset + warp * warp_bytes)
                    if is_second:
                        y_rows = int32(0) if aborted else y_rows
                        send_half(acc, ctx, smem, lane, buffer, own_row, y_rows, column)
                        send_half(acc_1, ctx, smem, lane, buffer, own_row, y_rows, int32(column + COLUMNS))
                    elif is_fp8:
                        to = activated, activated_scale, lane, buffer
                        store_in_fp8(smem, *to, acc, acc_1, int32(row + own_row), y_rows, column)
                    else:
                        values, _, _ = activate(acc, acc_1)
                        store_in_bf16(values, smem, activated, lane, buffer, int32(row + own_row), y_rows, column)
                else:
                    # ---- No rows for this warpgroup: release the stages, whose empty barriers count all warps ----
                    for _ in range(k_blocks):
                        mbarrier_wait_parity(smem.barriers, full + stage, phase)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(smem.barriers, empty + stage)
                        stage, phase = advance(stage, phase)
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(smem.barriers, stored)
                row, rows, column, g = arrived_tile(smem, stage, phase)

    return one_kernel, shared_bytes
