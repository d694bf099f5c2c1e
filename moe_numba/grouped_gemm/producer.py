"""What the loading warps do: one thread fills the ring of stages by TMA, three warps bring what it cannot.

That is the factors of a scaling, and rows of x that are chosen by an index.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.constants import LINE, SCALERS
from moe_numba.grouped_gemm.gather import land, make_choose, make_fetch, slot_of
from moe_numba.grouped_gemm.schedule import TILE_ROWS
from moe_numba.grouped_gemm.tile_scheduler import make_place, make_walk
from moe_numba.ptx.arithmetic import float_as_int
from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_load_3d_hint,
)
from moe_numba.ptx.warp import uniform

BOTH = 0b11  # blocks of a cluster


@cache
def make_load(constants, layout):
    """``load(...)``: the one thread that fills the ring, tile after tile.

    With a tile's first stage it tells the multiplying warps which tile it is: they would wait long for the memory that
    says so, and this thread is ahead of them.
    """
    stages, stage_bytes, x_at, part_bytes = constants.stages, layout.stage_bytes, layout.x_at, layout.part_bytes
    advance = make_advance(constants.stages)
    full_at, empty_at, two = layout.full_at, layout.empty_at, constants.parts == 2
    shared, box_tokens, activated = constants.cluster == 2, layout.box_tokens, constants.activated
    orders_at, by_tensor = layout.orders_at, constants.scaling == "tensor"
    tma_bytes, gather = layout.tma_bytes, constants.gather
    line = LINE // 2 if constants.dtype == "bf16" else LINE  # elements of k
    place = make_place(constants, layout)
    first_tile, tile_step = make_walk(constants.cluster)

    @cuda.jit(device=True)
    def load(
        smem,
        words,
        bars,
        map_x,
        map_weight,
        weight_scale,
        lengths,
        starts,
        groups,
        total,
        capacity,
        tiles,
        k_blocks,
        n_out,
    ):
        stage, parity = int32(0), uint32(1)
        once, often = createpolicy_evict_first(), createpolicy_evict_last()
        tile = first_tile()
        while tile < tiles:
            g, row, rows, part, n = place(words, lengths, starts, groups, total, capacity, tile)
            mbarrier_wait_parity(bars, empty_at + stage, parity)
            order = uint32(orders_at + 4 * stage)
            words[order] = row
            words[order + uint32(1)] = int32(rows | (part << 16))
            words[order + uint32(2)] = int32(n * TILE_ROWS)
            words[order + uint32(3)] = float_as_int(weight_scale[g]) if by_tensor else int32(0)
            if shared:  # this block's share of the tokens, which reaches both
                mine = int32(cluster_ctarank())
                row = int32(row + mine * (part if two else box_tokens))
                place_of_mine = int32(x_at + mine * (box_tokens * LINE))
            for block in range(k_blocks):
                k, at = int32(block * line), int32(stage * stage_bytes)
                mbarrier_wait_parity(bars, empty_at + stage, parity)
                mbarrier_arrive_expect_tx(bars, full_at + stage, tma_bytes)
                tma_load_3d_hint(smem, at, map_weight, 0, k, int32(n * TILE_ROWS), g, bars, full_at + stage, once)
                if activated:
                    up, to = int32(n_out + n * TILE_ROWS), int32(at + TILE_ROWS * LINE)
                    tma_load_3d_hint(smem, to, map_weight, 0, k, up, g, bars, full_at + stage, once)
                if shared:
                    to = int32(at + place_of_mine)
                    tma_load_2d_multicast_hint(smem, to, map_x, 0, k, row, bars, full_at + stage, BOTH, often)
                elif not gather:
                    tma_load_2d_hint(smem, at + x_at, map_x, 0, k, row, bars, full_at + stage, often)
                    if two:
                        to = int32(at + x_at + part_bytes)
                        tma_load_2d_hint(smem, to, map_x, 0, k, int32(row + part), bars, full_at + stage, often)
                stage, parity = advance(stage, parity)
            tile = int32(tile + tile_step())

    return load


@cache
def make_scale(constants, layout):
    """``scale(...)``: what each token's product of a stage is to be multiplied with; a warp has every third stage.

    With ``gather`` the tokens themselves too, which are under way meanwhile.
    A token's factor is its own scale times the weights'. A thread of the multiplication has columns 8 j + 2 q + i, with
    q its place among four: so the factors lie in quarters, each in the order of j and i.
    """
    stages, full_at, empty_at = constants.stages, layout.full_at, layout.empty_at
    advance = make_advance(constants.stages)
    factors_at, stage_factors, pitch = layout.factors_at, layout.stage_factors, layout.factor_pitch
    tokens, products = constants.tokens, layout.products if constants.scaling == "block" else 0
    by_block, gather = constants.scaling == "block", constants.gather
    chosen_at, warps_own, chosen_pitch = layout.chosen_at, layout.chosen, layout.chosen_pitch
    choose, fetch = make_choose(constants, layout), make_fetch(constants, layout)
    parts, tiles_of_weights = constants.parts, 2 if constants.activated else 1
    each = -(-tokens // 32)  # tokens of a part for each lane
    of_a_lane = each * parts
    place = make_place(constants, layout)
    first_tile, tile_step = make_walk(constants.cluster)

    @cuda.jit(device=True)
    def scale(
        words,
        floats,
        bars,
        turn,
        lane,
        x_scale,
        weight_scale,
        lengths,
        starts,
        groups,
        total,
        capacity,
        tiles,
        k_blocks,
        across,
        smem,
        x,
        indices,
        height,
        row_bytes,
        valid_bytes,
    ):
        stage, parity, mine = int32(0), uint32(1), int32(turn)
        if gather:
            chosen, row_bytes = int32(chosen_at + turn * warps_own), uniform(row_bytes)
        scales = cuda.local.array(of_a_lane, float32)
        of_weights = cuda.local.array(tiles_of_weights, float32)
        tile = first_tile()
        while tile < tiles:
            g, row, rows, part, n = place(words, lengths, starts, groups, total, capacity, tile)
            weights = int64(g) * tiles_of_weights * across + min(n, across - 1)  # a cluster's last block may have none
            weights *= k_blocks
            own = int64(row + lane) * k_blocks
            if gather:
                choose(words, chosen, lane, indices, height, row, rows, part)
            for block in range(k_blocks):
                if mine == 0:
                    # All loads, one after the other, before the stage is waited for: their way is long.
                    for p in range(tiles_of_weights if by_block else 0):  # up lies so many tiles behind gate
                        of_weights[p] = weight_scale[weights + p * across * k_blocks + block]
                    for p in range(parts if by_block else 0):
                        for i in range(each):
                            inside = int32(lane + 32 * i)
                            token = int32(p * part + inside)
                            there = inside < part and token < rows
                            at = own + int32((p * part + 32 * i) * k_blocks) + block
                            if gather:
                                index = words[uint32(chosen + p * chosen_pitch + slot_of(inside))]
                                there, at = there and index >= 0, int64(index) * k_blocks + block
                            scales[each * p + i] = x_scale[at] if there else float32(0)
                    mbarrier_wait_parity(bars, empty_at + stage, parity)
                    if gather:
                        fetch(smem, words, chosen, lane, stage, block, x, row_bytes, valid_bytes, rows, part)
                    for p in range(products):
                        for i in range(each):
                            t = int32(lane + 32 * i)
                            quarter = int32(4 * p + ((t >> 1) & 3))
                            at = int32(factors_at + stage * stage_factors + quarter * pitch)
                            if t < tokens:
                                factor = scales[each * (p % parts) + i] * of_weights[p % tiles_of_weights]
                                floats[uint32(at + (t >> 3) * 2 + (t & 1))] = factor
                    if gather:
                        land()
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(bars, full_at + stage)
                mine = int32(mine + SCALERS - 1) if mine == 0 else int32(mine - 1)
                stage, parity = advance(stage, parity)
            tile = int32(tile + tile_step())

    return scale
