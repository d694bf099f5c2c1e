"""What a multiplying warpgroup does for one tile: the main loop over k.

The product is computed transposed, weights by tokens: a warpgroup has 64 rows of the weights, and the tokens are the
multiplication's other side, whose length may be any multiple of 8.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

from moe_numba.grouped_gemm.constants import LINE
from moe_numba.grouped_gemm.epilogue import make_write
from moe_numba.grouped_gemm.schedule import TILE_ROWS
from moe_numba.ptx.accumulators import make_fma, make_fma_columns
from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.matrix import make_fma_shared, make_load_shared
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_relaxed_cluster, mbarrier_wait_parity
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

REGISTERS = 190  # of a thread, that totals, a product and factors may take


@cache
def make_give_back(cluster):
    """``give_back(bars, i)``: as far as this warp goes a stage may be filled again, by whichever block fills it."""
    if cluster == 1:
        return mbarrier_arrive

    @cuda.jit(device=True)
    def give_back(bars, i):
        mbarrier_arrive(bars, i)
        mbarrier_arrive_relaxed_cluster(bars, i, uint32(cluster_ctarank() ^ uint32(1)))  # it only read

    return give_back


@cache
def make_step(n, constants, layout):
    """``total = step(smem, floats, bars, a, b, total, quarter, stage, release)``: a stage's product, added to a total.

    ``release`` tells that the stage is not needed any more when the multiplication is done.
    """
    empty_at, scaling = layout.empty_at, constants.scaling
    wait, give_back = make_wgmma_wait(n, 0), make_give_back(constants.cluster)

    if constants.dtype == "bf16":  # float32 sums: nothing to be promoted
        tile = make_wgmma_tile(n, "bf16", accumulate=True)

        @cuda.jit(device=True)
        def step(smem, floats, bars, a, b, total, quarter, stage, release):
            total = wait(tile(total, a, b))
            if release:
                give_back(bars, empty_at + stage)
            return total

        return step

    tile = make_wgmma_tile(n, "e4m3")
    if scaling == "block" and n // 2 * (layout.products + 1) + n // 4 <= REGISTERS:
        load, fma = make_load_shared(n), make_fma_columns(n)

        @cuda.jit(device=True)
        def step(smem, floats, bars, a, b, total, quarter, stage, release):
            product = tile(a, b)
            factors = load(floats, quarter)
            product = wait(product)
            cuda.syncwarp()
            if release:  # the factors are part of the stage, and have been read
                give_back(bars, empty_at + stage)
            return fma(total, product, factors)

    elif scaling == "block":
        fma = make_fma_shared(n)

        @cuda.jit(device=True)
        def step(smem, floats, bars, a, b, total, quarter, stage, release):
            product = wait(tile(a, b))
            total = fma(total, product, floats, quarter)
            cuda.syncwarp()
            if release:
                give_back(bars, empty_at + stage)
            return total

    else:
        fma = make_fma(n)

        @cuda.jit(device=True)
        def step(smem, floats, bars, a, b, total, quarter, stage, release):
            product = wait(tile(a, b))
            if release:
                give_back(bars, empty_at + stage)
            return fma(total, product, float32(1))

    return step


@cache
def make_compute(constants, layout):
    """``stage, parity = compute(...)``: one tile, with the smallest multiplication that holds a part's tokens."""
    mine = _make_compute(constants.sizes[0], constants, layout)
    if len(constants.sizes) == 1:
        return mine
    smaller = make_compute(constants._replace(sizes=constants.sizes[1:]), layout)
    next_size = constants.sizes[1]

    @cuda.jit(device=True)
    def compute(
        smem,
        words,
        floats,
        bars,
        y,
        y_scale,
        warp,
        lane,
        stage,
        parity,
        k_blocks,
        row,
        rows,
        part,
        column,
        n_out,
        factor,
    ):
        if part > next_size:
            stage, parity = mine(
                smem,
                words,
                floats,
                bars,
                y,
                y_scale,
                warp,
                lane,
                stage,
                parity,
                k_blocks,
                row,
                rows,
                part,
                column,
                n_out,
                factor,
            )
        else:
            stage, parity = smaller(
                smem,
                words,
                floats,
                bars,
                y,
                y_scale,
                warp,
                lane,
                stage,
                parity,
                k_blocks,
                row,
                rows,
                part,
                column,
                n_out,
                factor,
            )
        return stage, parity

    return compute


def _make_compute(n, constants, layout):
    step, write = make_step(n, constants, layout), make_write(n, constants, layout)
    stages, stage_bytes, x_at, part_bytes = constants.stages, layout.stage_bytes, layout.x_at, layout.part_bytes
    advance = make_advance(constants.stages)
    full_at, factors_at, stage_factors = layout.full_at, layout.factors_at, layout.stage_factors
    quarter_pitch, two, activated = layout.factor_pitch, layout.products == 2, constants.activated
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def compute(
        smem,
        words,
        floats,
        bars,
        y,
        y_scale,
        warp,
        lane,
        stage,
        parity,
        k_blocks,
        row,
        rows,
        part,
        column,
        n_out,
        factor,
    ):
        half = int32((warp >> 2) * (64 * LINE))
        total, other = zeros, zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(bars, full_at + stage, parity)
            at = int32(stage * stage_bytes)
            a = wgmma_descriptor(smem, at + half)
            b = wgmma_descriptor(smem, at + x_at)
            quarter = int32(factors_at + stage * stage_factors + (lane & 3) * quarter_pitch)
            total = step(smem, floats, bars, a, b, total, quarter, stage, lane == 0 and not two)
            if two:
                if activated:
                    a = uint64(a + uint64(TILE_ROWS * LINE >> 4))
                else:
                    b = uint64(b + uint64(part_bytes >> 4))
                quarter = int32(quarter + 4 * quarter_pitch)
                other = step(smem, floats, bars, a, b, other, quarter, stage, lane == 0)
            stage, parity = advance(stage, parity)
        write(smem, words, y, y_scale, warp, lane, total, other, row, rows, part, column, n_out, factor)
        return stage, parity

    return compute
