"""The grouped GEMM's kernel: persistent blocks that each walk over the tiles of all groups.

Four warps load and eight multiply. One thread asks TMA for the tiles of weights and tokens; they go through a ring of
stages, each with a barrier that says "full" and one that says "empty". Weights have one tensor map for all groups, and
so have tokens: what a tile has beyond its group's tokens is computed and not stored. So nothing has to be prepared.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.constants import LINE, MULTIPLIERS, WARPS, Layout
from moe_numba.grouped_gemm.schedule import TILE_ROWS, device
from moe_numba.grouped_gemm.tile import make_compute
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
    mbarrier_wait_parity_cluster,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_load_3d_hint,
)
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc

THREADS = 32 * WARPS
SCALERS = 3  # warps that bring the factors of "block" scaling, in turn
FULL, BOTH = 0xFFFFFFFF, 0b11  # lanes of a warp; blocks of a cluster

divide, tiles_of, part_of, group_of = device.divide, device.tiles_of, device.part_of, device.group_of


@cache
def make_group(rows):
    """``first, count = group(lengths, starts, g, total, capacity)``: a group's rows, in bounds whatever memory holds.

    "lengths": counts and first rows; "offsets": ``lengths`` has each group's end; "masked": ``lengths`` has counts, and
    a group begins every ``capacity`` rows.
    """

    @cuda.jit(device=True)
    def group(lengths, starts, g, total, capacity):
        if rows == "offsets":
            first = lengths[g - 1] if g else int32(0)
            count = int32(lengths[g] - first)
        elif rows == "masked":
            first, count = int32(g * capacity), int32(min(lengths[g], capacity))
        else:
            first, count = starts[g], lengths[g]
        first = int32(min(max(first, int32(0)), total))
        return first, int32(min(max(count, int32(0)), int32(total - first)))

    return group


@cache
def make_scan(constants, layout):
    """``tiles = scan(...)``: the first tile of each group into shared memory; gives how many there are."""
    sums_at, tiles_at, most = layout.sums_at, layout.tiles_at, constants.tokens * constants.parts
    group = make_group(constants.rows)

    @cuda.jit(device=True)
    def scan(words, lengths, starts, groups, total, capacity, across):
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        done = int32(0)
        for base in range(0, groups, THREADS):
            g, tiles = int32(base + thread), int32(0)
            if g < groups:
                _, count = group(lengths, starts, g, total, capacity)
                tiles = int32(tiles_of(count, most) * across)
            own = tiles
            for d in range(5):
                below = cuda.shfl_up_sync(FULL, tiles, 1 << d)
                tiles = int32(tiles + below) if lane >= (1 << d) else tiles
            if lane == 31:
                words[uint32(sums_at + warp)] = tiles
            cuda.syncthreads()
            before, after = done, done
            for w in range(WARPS):
                sum_of_warp = words[uint32(sums_at + w)]
                before = int32(before + sum_of_warp) if w < warp else before
                after = int32(after + sum_of_warp)
            if g < groups:
                words[uint32(tiles_at + g)] = int32(before + tiles - own)
            done = after
            cuda.syncthreads()
        return done

    return scan


@cache
def make_place(constants, layout):
    """``g, row, rows, part, n = place(...)``: a tile's group, tokens, tokens of a part, and tile of weights."""
    tiles_at, parts, most = layout.tiles_at, constants.parts, constants.tokens * constants.parts
    cluster = constants.cluster
    group = make_group(constants.rows)

    @cuda.jit(device=True)
    def place(words, lengths, starts, groups, total, capacity, tile):
        g = group_of(words, tiles_at, groups, tile)
        first, count = group(lengths, starts, g, total, capacity)
        tiles = tiles_of(count, most)
        part = part_of(count, tiles, parts)
        inside = int32(tile - words[uint32(tiles_at + g)])
        n = divide(inside, tiles)
        begin = int32(int32(inside - n * tiles) * int32(part * parts))
        if cluster == 2:
            n = int32(2 * n + int32(cluster_ctarank()))
        return g, int32(first + begin), int32(min(part * parts, int32(count - begin))), part, n

    return place

@cache
def make_walk(cluster):
    """``first_tile()`` of a block, and ``tile_step()`` to its next; the blocks of a cluster walk together."""
    shift = cluster - 1

    @cuda.jit(device=True)
    def first_tile():
        return int32(cuda.blockIdx.x >> shift)

    @cuda.jit(device=True)
    def tile_step():
        return int32(cuda.gridDim.x >> shift)

    return first_tile, tile_step


@cache
def make_load(constants, layout):
    """``load(...)``: the one thread that fills the ring, tile after tile."""
    stages, stage_bytes, x_at, part_bytes = constants.stages, layout.stage_bytes, layout.x_at, layout.part_bytes
    full_at, empty_at, two = layout.full_at, layout.empty_at, constants.parts == 2
    shared, box_tokens, step = constants.cluster == 2, layout.box_tokens, constants.cluster
    wait = mbarrier_wait_parity_cluster if shared else mbarrier_wait_parity
    line = LINE // 2 if constants.dtype == "bf16" else LINE  # elements of k
    place = make_place(constants, layout)
    first_tile, tile_step = make_walk(constants.cluster)

    @cuda.jit(device=True)
    def load(smem, words, bars, map_x, map_weight, lengths, starts, groups, total, capacity, tiles, k_blocks):
        stage, parity = int32(0), uint32(1)
        once, often = createpolicy_evict_first(), createpolicy_evict_last()
        tile = first_tile()
        while tile < tiles:
            g, row, _, part, n = place(words, lengths, starts, groups, total, capacity, tile)
            if shared:  # this block's share of the tokens, which reaches both
                mine = int32(cluster_ctarank())
                row = int32(row + mine * (part if two else box_tokens))
                place_of_mine = int32(x_at + mine * (box_tokens * LINE))
            for block in range(k_blocks):
                k, at = int32(block * line), int32(stage * stage_bytes)
                wait(bars, empty_at + stage, parity)
                mbarrier_arrive_expect_tx(bars, full_at + stage, stage_bytes)
                tma_load_3d_hint(smem, at, map_weight, 0, k, int32(n * TILE_ROWS), g, bars, full_at + stage, once)
                if shared:
                    to = int32(at + place_of_mine)
                    tma_load_2d_multicast_hint(smem, to, map_x, 0, k, row, bars, full_at + stage, BOTH, often)
                else:
                    tma_load_2d_hint(smem, at + x_at, map_x, 0, k, row, bars, full_at + stage, often)
                    if two:
                        to = int32(at + x_at + part_bytes)
                        tma_load_2d_hint(smem, to, map_x, 0, k, int32(row + part), bars, full_at + stage, often)
                stage = int32(stage + 1)
                if stage == stages:
                    stage, parity = int32(0), uint32(parity ^ uint32(1))
            tile = int32(tile + tile_step())

    return load


@cache
def make_scale(constants, layout):
    """``scale(...)``: what each token's product of a stage is to be multiplied with; a warp has every third stage.

    A token's factor is its own scale times the weights'. A thread of the multiplication has columns 8 j + 2 q + i, with
    q its place among four: so the factors lie in quarters, each in the order of j and i.
    """
    stages, full_at, empty_at = constants.stages, layout.full_at, layout.empty_at
    factors_at, stage_factors, pitch = layout.factors_at, layout.stage_factors, layout.factor_pitch
    tokens, parts = constants.tokens, constants.parts
    place = make_place(constants, layout)
    first_tile, tile_step = make_walk(constants.cluster)

    @cuda.jit(device=True)
    def scale(
        words, floats, bars, turn, lane, x_scale, weight_scale, lengths, starts, groups, total, capacity, tiles,
        k_blocks, across,
    ):
        stage, parity, mine = int32(0), uint32(1), int32(turn)
        tile = first_tile()
        while tile < tiles:
            g, row, rows, part, n = place(words, lengths, starts, groups, total, capacity, tile)
            weights = (int64(g) * across + min(n, across - 1)) * k_blocks  # a cluster's last block may have no tile
            for block in range(k_blocks):
                if mine == 0:
                    mbarrier_wait_parity(bars, empty_at + stage, parity)
                    of_weights = weight_scale[weights + block]
                    for p in range(parts):
                        for t in range(lane, tokens, 32):
                            token = int32(p * part + t)
                            factor = float32(0)
                            if t < part and token < rows:
                                factor = x_scale[int64(row + token) * k_blocks + block] * of_weights
                            quarter = int32(4 * p + ((t >> 1) & 3))
                            at = int32(factors_at + stage * stage_factors + quarter * pitch)
                            floats[uint32(at + (t >> 3) * 2 + (t & 1))] = factor
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(bars, full_at + stage)
                mine = int32(mine + SCALERS - 1) if mine == 0 else int32(mine - 1)
                stage = int32(stage + 1)
                if stage == stages:
                    stage, parity = int32(0), uint32(parity ^ uint32(1))
            tile = int32(tile + tile_step())

    return scale


@cache
def make_kernel(constants):
    """The kernel, for a grid of any number of blocks of 384 threads, and its dynamic shared memory in bytes."""
    if constants.scaling == "block" and constants.stages < SCALERS:
        # A warp that looks at every third stage would not tell a barrier's phase from the one two further on.
        raise ValueError(f"stages is {constants.stages}; with block scaling it must be {SCALERS} or more")
    layout = Layout(constants)
    stages, full_at, empty_at = constants.stages, layout.full_at, layout.empty_at
    by_tensor, by_block = constants.scaling == "tensor", constants.scaling == "block"
    arrivals, cluster = 2 if by_block else 1, constants.cluster
    first_tile, tile_step = make_walk(cluster)
    line_shift = 6 if constants.dtype == "bf16" else 7
    loaders, multipliers = (40, 232) if by_block or cluster == 2 else (24, 240)  # together what 12 warps had: 168 each
    release_registers, request_registers = make_setmaxnreg_dec(loaders), make_setmaxnreg_inc(multipliers)
    scan, place, load = make_scan(constants, layout), make_place(constants, layout), make_load(constants, layout)
    compute, scale = make_compute(constants, layout), make_scale(constants, layout)

    @cuda.jit
    def grouped_gemm(
        map_x, map_weight, y, lengths, starts, x_scale, weight_scale, groups, total, capacity, n_out, k,
    ):
        smem = cuda.shared.array(0, uint8, 1024)
        words = cuda.shared.array(0, int32, 1024)
        floats = cuda.shared.array(0, float32, 1024)
        bars = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(bars, full_at + stage, arrivals)
                mbarrier_init(bars, empty_at + stage, MULTIPLIERS * cluster)
            fence_mbarrier_init()
        if cluster == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        griddepcontrol_wait()
        across = int32((n_out + TILE_ROWS - 1) >> 7)
        k_blocks = int32((k + (1 << line_shift) - 1) >> line_shift)
        tiles = scan(words, lengths, starts, groups, total, capacity, int32((across + cluster - 1) // cluster))
        if warp >= MULTIPLIERS:
            release_registers()
            if warp == MULTIPLIERS and elect_sync(FULL):  # of an elected lane the compiler knows that it is alone
                load(smem, words, bars, map_x, map_weight, lengths, starts, groups, total, capacity, tiles, k_blocks)
                griddepcontrol_launch_dependents()
            if by_block and warp > MULTIPLIERS:
                scale(
                    words, floats, bars, warp - MULTIPLIERS - 1, lane, x_scale, weight_scale, lengths, starts, groups,
                    total, capacity, tiles, k_blocks, across,
                )
        else:
            request_registers()
            stage, parity = int32(0), uint32(0)
            tile = first_tile()
            while tile < tiles:
                g, row, rows, part, n = place(words, lengths, starts, groups, total, capacity, tile)
                factor = weight_scale[g] if by_tensor else float32(1)
                stage, parity = compute(
                    smem, words, floats, bars, y, warp, lane, stage, parity, k_blocks, row, rows, part,
                    int32(n * TILE_ROWS), int32(n_out >> 1), factor,
                )
                tile = int32(tile + tile_step())
        if cluster == 2:  # the other block may still write into this one's memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return grouped_gemm, layout.bytes
