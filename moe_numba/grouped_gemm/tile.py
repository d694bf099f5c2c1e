"""What a multiplying warpgroup does for one tile: the main loop over k, and the results' way to global memory.

The product is computed transposed, weights by tokens: a warpgroup has 64 rows of the weights, and the tokens are the
multiplication's other side, whose length may be any multiple of 8.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.grouped_gemm.constants import LINE
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.fragment import make_fma_shared, make_stmatrix_fragment
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_wait_parity
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

CHUNK = 32  # tokens that go through a warp's staging at once, 32 bytes of each


@cache
def make_give_back(cluster):
    """``give_back(bars, i)``: a stage may be filled again, as far as this warp goes; it may be filled by either block."""
    if cluster == 1:
        return mbarrier_arrive

    @cuda.jit(device=True)
    def give_back(bars, i):
        mbarrier_arrive_cluster(bars, i, uint32(0))
        mbarrier_arrive_cluster(bars, i, uint32(1))

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
    if scaling == "block":
        fma = make_fma_shared(n)

        @cuda.jit(device=True)
        def step(smem, floats, bars, a, b, total, quarter, stage, release):
            product = wait(tile(a, b))
            total = fma(total, product, floats, quarter)
            cuda.syncwarp()
            if release:  # the factors are part of the stage
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
def make_store(n, first=0):
    """``store(...)``: columns ``first`` and on of a fragment become rows in global memory, as bf16.

    A warp has 16 neighbours of each token's row, 32 bytes. They go through its staging so that a lane stores 16 bytes.
    """
    count = min(CHUNK, n - first)
    put_fragment = make_stmatrix_fragment(n, first, count, 32)
    both, more = count > CHUNK // 2, first + CHUNK < n
    following = make_store(n, first + CHUNK) if more else None
    second = first + CHUNK // 2

    @cuda.jit(device=True)
    def store(smem, words, y, put, take, total, factor, token, rows, at, pitch):
        put_fragment(smem, put, total, factor)
        cuda.syncwarp()
        if token + first < rows:
            a, b, c, d = ld_shared_s32x4(words, take)
            st_global_s32x4(y, at + int64(first) * pitch, a, b, c, d)
        if both:
            if token + second < rows:
                a, b, c, d = ld_shared_s32x4(words, int32(take + 128))
                st_global_s32x4(y, at + int64(second) * pitch, a, b, c, d)
        cuda.syncwarp()
        if more:
            following(smem, words, y, put, take, total, factor, token, rows, at, pitch)

    return store


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
        smem, words, floats, bars, y, warp, lane, stage, parity, k_blocks, row, rows, part, column, pitch, factor,
    ):
        if part > next_size:
            stage, parity = mine(
                smem, words, floats, bars, y, warp, lane, stage, parity, k_blocks, row, rows, part, column, pitch,
                factor,
            )
        else:
            stage, parity = smaller(
                smem, words, floats, bars, y, warp, lane, stage, parity, k_blocks, row, rows, part, column, pitch,
                factor,
            )
        return stage, parity

    return compute


def _make_compute(n, constants, layout):
    step, store = make_step(n, constants, layout), make_store(n)
    stages, stage_bytes, x_at, part_bytes = constants.stages, layout.stage_bytes, layout.x_at, layout.part_bytes
    full_at, factors_at, stage_factors = layout.full_at, layout.factors_at, layout.stage_factors
    quarter_pitch, staging_at = layout.factor_pitch, layout.staging_at
    two = constants.parts == 2
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def compute(
        smem, words, floats, bars, y, warp, lane, stage, parity, k_blocks, row, rows, part, column, pitch, factor,
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
                b = uint64(b + uint64(part_bytes >> 4))
                quarter = int32(quarter + 4 * quarter_pitch)
                other = step(smem, floats, bars, a, b, other, quarter, stage, lane == 0)
            stage = int32(stage + 1)
            if stage == stages:
                stage, parity = int32(0), uint32(parity ^ uint32(1))

        # A row of the staging is a token's 32 bytes. Its two chunks change places in every second group of four rows,
        # so that eight rows, written chunk by chunk, fall on all banks.
        staging = int32(staging_at + warp * 1024)
        put = int32(staging + (lane & 7) * 32 + ((((lane >> 3) ^ (lane >> 2)) & 1) << 4))
        token, chunk = int32(lane >> 1), int32(lane & 1)
        take = int32(staging + token * 32 + ((chunk ^ ((token >> 2) & 1)) << 4)) >> 2
        column = int32(column + warp * 16)
        if column < pitch * 2:
            at = (int64(row) + token) * pitch + ((column >> 1) + chunk * 4)
            store(smem, words, y, put, take, total, factor, token, int32(min(rows, part)), at, pitch)
            if two:
                at += int64(part) * pitch
                store(smem, words, y, put, take, other, factor, token, int32(rows - part), at, pitch)
        return stage, parity

    return compute
