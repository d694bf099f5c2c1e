"""The way of a tile's results to global memory: fragments become rows, rounded to bf16, or activated and in FP8."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.constants import ACTIVATED, CHUNK, LINE, MULTIPLIERS, ROW, STAGING
from moe_numba.grouped_gemm.schedule import TILE_ROWS
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.matrix import make_stmatrix_fragment
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.ptx.warpgroup import bar_sync

FULL = 0xFFFFFFFF
LOG2_E = 1.4426950408889634
FP8_MOST = 448.0  # the largest number of e4m3


@cache
def make_store(n, parts, i=0):
    """``store(...)``: the chunks of a tile's fragments from the i-th on become rows in global memory, as bf16.

    A warpgroup has 64 neighbours of each token's row, 128 bytes. They go through its staging, 16 tokens at a time and
    from two buffers by turns, so that eight lanes store a whole line. The next chunk is put there before this one is
    taken: nothing waits for its own words.
    """
    chunks = [(part, first) for part in range(parts) for first in range(0, n, CHUNK)]
    (part, first), buffer, more = chunks[i], i % 2 * CHUNK * LINE, i + 1 < len(chunks)
    if more:
        next_part, next_first = chunks[i + 1]
        put_next = make_stmatrix_fragment(n, next_first, min(CHUNK, n - next_first), LINE)
        following, other_buffer = make_store(n, parts, i + 1), CHUNK * LINE - buffer

    @cuda.jit(device=True)
    def store(smem, words, y, group, put, take, total, other, factor, token, here, beyond, at, pitch, part_pitch):
        if more:
            put_next(smem, int32(put + other_buffer), other if next_part else total, factor)
        a, b, c, d = ld_shared_s32x4(words, int32(take + buffer // 4))
        if more or buffer == 0:  # the next tile begins with buffer 0, which may still be read
            bar_sync(int32(2 + group), 128)
        if token + first < (beyond if part else here):
            place = at + int64(first) * pitch + (part_pitch if part else int64(0))
            st_global_s32x4(y, place, a, b, c, d)
        if more:
            following(
                smem, words, y, group, put, take, total, other, factor, token, here, beyond, at, pitch, part_pitch
            )

    return store


@cache
def make_activate(n, layout, first=0):
    """``activate(...)``: silu(gate) * up of the tokens from ``first`` on, as FP8 with a scale for each token.

    All eight warps put 32 tokens' gate and up, rounded to bf16, into the staging as rows; then a warp takes a token, 4
    of its 128 columns a lane, so that the largest is found by one reduction.
    """
    count, staging_at = min(ACTIVATED, n - first), layout.staging_at
    put_fragment = make_stmatrix_fragment(n, first, count, ROW)
    more = first + ACTIVATED < n
    following = make_activate(n, layout, first + ACTIVATED) if more else None

    @cuda.jit(device=True)
    def activate(smem, words, y, y_scale, warp, lane, gate, up, factor, row, rows, column, n_out):
        bar_sync(1, 32 * MULTIPLIERS)  # what lay there has been read
        at = int32(staging_at + (lane & 7) * ROW + (lane >> 3 & 1) * 16 + warp * 32)
        put_fragment(smem, at, gate, factor)
        put_fragment(smem, int32(at + 2 * TILE_ROWS), up, factor)
        bar_sync(1, 32 * MULTIPLIERS)
        for token in range(warp, count, MULTIPLIERS):
            if first + token < rows:
                here = int32((staging_at + token * ROW) // 4 + 2 * lane)
                largest = float32(0)
                values = cuda.local.array(4, float32)
                for i in range(2):
                    gates, ups = uint32(words[here + i]), uint32(words[here + 64 + i])
                    for h in range(2):
                        g = uint_as_float(uint32(gates & uint32(0xFFFF0000)) if h else uint32(gates << uint32(16)))
                        u = uint_as_float(uint32(ups & uint32(0xFFFF0000)) if h else uint32(ups << uint32(16)))
                        value = g * rcp_approx(float32(1) + ex2_approx(g * float32(-LOG2_E))) * u
                        values[2 * i + h] = value
                        largest = max(largest, abs(value))
                largest = int_as_float(redux_sync_max_s32(uint32(FULL), float_as_int(largest)))
                scale = max(largest, float32(1e-10)) * float32(1 / FP8_MOST)
                inverse = rcp_approx(scale)  # a division would be a call, and the multiplications would wait for it
                low = cvt_rn_satfinite_e4m3x2_f32(values[1] * inverse, values[0] * inverse)
                high = cvt_rn_satfinite_e4m3x2_f32(values[3] * inverse, values[2] * inverse)
                place = int64(row + first + token)
                y[(place * n_out + column) // 4 + lane] = int32(uint32(low | uint32(high << uint32(16))))
                if lane == 0:
                    y_scale[place * (n_out >> 7) + (column >> 7)] = scale
        if more:
            following(smem, words, y, y_scale, warp, lane, gate, up, factor, row, rows, column, n_out)

    return activate


@cache
def make_write(n, constants, layout):
    """``write(...)``: a tile's results, of one or two products."""
    if constants.activated:
        activate = make_activate(n, layout)

        @cuda.jit(device=True)
        def write(smem, words, y, y_scale, warp, lane, total, other, row, rows, part, column, n_out, factor):
            if column < n_out:
                activate(smem, words, y, y_scale, warp, lane, total, other, factor, row, rows, column, n_out)

        return write

    store, staging_at = make_store(n, constants.parts), layout.staging_at
    put_first = make_stmatrix_fragment(n, 0, min(CHUNK, n), LINE)

    @cuda.jit(device=True)
    def write(smem, words, y, y_scale, warp, lane, total, other, row, rows, part, column, n_out, factor):
        # A row of the staging is a token's 128 bytes. Its chunks of 16 change places by the number of the row, so that
        # a column of them, which a warp writes, falls on all banks.
        group = int32(warp >> 2)
        staging = int32(staging_at + group * STAGING)
        chunk = int32(2 * (warp & 3) + (lane >> 3 & 1))
        put = int32(staging + (lane & 7) * LINE + ((chunk ^ (lane & 7)) << 4))
        token, chunk = int32(4 * (warp & 3) + (lane >> 3)), int32(lane & 7)
        take = int32(staging + token * LINE + ((chunk ^ (token & 7)) << 4)) >> 2
        column, pitch = int32(column + group * 64), int32(n_out >> 1)
        if column < n_out:
            put_first(smem, put, total, factor)
            bar_sync(int32(2 + group), 128)
            at, part_pitch = (int64(row) + token) * pitch + ((column >> 1) + chunk * 4), int64(part) * pitch
            here, beyond = int32(min(rows, part)), int32(rows - part)
            store(smem, words, y, group, put, take, total, other, factor, token, here, beyond, at, pitch, part_pitch)

    return write
