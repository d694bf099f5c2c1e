"""Rows chosen by an index: three warps, which have every third stage in turn, copy them into the ring themselves.

They put them where TMA would have, swizzled, so that the multiplication sees no difference. Rows of a part beyond its
tokens are left as they were: they are multiplied, and not stored.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from moe_numba.grouped_gemm.constants import LINE
from moe_numba.ptx.cp_async import advance, cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.memory import ld_shared_s32x4

wait_for_all = make_cp_async_wait_group(0)


@cuda.jit(device=True)
def slot_of(t):
    """Where the index of a part's row t lies: the four that a lane needs one after the other lie side by side."""
    return int32((t & ~15) | (t & 3) << 2 | (t >> 2 & 3))


@cache
def make_choose(constants, layout):
    """``choose(...)``: the indices of a tile's rows into a warp's own memory, negative for a row of zeros."""
    parts, each, pitch = constants.parts, -(-constants.tokens // 32), layout.chosen_pitch
    of_a_lane = each * parts

    @cuda.jit(device=True)
    def choose(words, chosen, lane, indices, height, row, rows, part):
        found = cuda.local.array(of_a_lane, int32)
        for p in range(parts):  # all loads first: their way is long
            for i in range(each):
                t = int32(lane + 32 * i)
                token = int32(p * part + t)
                found[each * p + i] = indices[row + token] if t < part and token < rows else int32(-1)
        for p in range(parts):
            for i in range(each):
                index = found[each * p + i]
                at = uint32(chosen + p * pitch + slot_of(int32(lane + 32 * i)))
                words[at] = index if index < height else int32(-1)
        cuda.syncwarp()

    return choose


@cache
def make_fetch(constants, layout):
    """``fetch(...)``: start to copy a stage's rows; eight lanes have a row's 128 bytes, 16 each."""
    stage_bytes, x_at, part_bytes = layout.stage_bytes, layout.x_at, layout.part_bytes
    parts, pitch = constants.parts, layout.chosen_pitch

    @cuda.jit(device=True)
    def copy(smem, at, x, index, least, row_bytes):
        size = 16 if index >= least else 0
        cp_async_16(smem, at, x, uint64(uint32(index)) * uint64(uint32(row_bytes)), size)

    @cuda.jit(device=True)
    def fetch(smem, words, chosen, lane, stage, block, x, row_bytes, valid_bytes, rows, part):
        chunk, t = int32(lane & 7), int32(lane >> 3)
        begin = int32(block * LINE + 16 * chunk)
        inside = begin < valid_bytes
        x = advance(x, begin if inside else int32(0))
        least = int32(0 if inside else 0x7FFFFFFF)  # beyond the end of k no index is good enough
        for p in range(parts):
            even = int32(stage * stage_bytes + x_at + p * part_bytes + t * LINE + ((chunk ^ t) << 4))
            odd = int32(even ^ 4 << 4)  # of row t + 4: the swizzle is the row's number within eight
            source, left = int32(chosen + p * pitch + 4 * t), int32(min(part, rows - p * part) - t)
            while left + t > 0:
                a, b, c, d = ld_shared_s32x4(words, source)
                if left > 0:
                    copy(smem, even, x, a, least, row_bytes)
                if left > 4:
                    copy(smem, int32(odd + 4 * LINE), x, b, least, row_bytes)
                if left > 8:
                    copy(smem, int32(even + 8 * LINE), x, c, least, row_bytes)
                if left > 12:
                    copy(smem, int32(odd + 12 * LINE), x, d, least, row_bytes)
                source, left = int32(source + 16), int32(left - 16)
                even, odd = int32(even + 16 * LINE), int32(odd + 16 * LINE)
        cp_async_commit_group()

    return fetch


@cuda.jit(device=True)
def land():
    """What this lane copied is there for the multiplication: once the warp has met, all that the warp did is."""
    wait_for_all()
    fence_proxy_async_shared()
