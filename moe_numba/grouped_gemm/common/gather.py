"""Gathered rows of x: producer warps copy the rows that an index array names into the pipeline with ``cp.async``.

The rows are swizzled as TMA would write them, so that wgmma reads both the same way. Rows of a subtile beyond the
group's last row are not written: wgmma multiplies whatever shared memory holds, and the epilogue does not store it.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32, uint64

from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES
from moe_numba.ptx.cp_async import advance, cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.memory import ld_shared_s32x4

cp_async_wait_all = make_cp_async_wait_group(0)


class GatherSource(NamedTuple):
    """The rows of x in global memory, and the indices that select them."""

    x: Any  # uint8 pointer
    row_indices: Any  # int32 pointer, one index for each row of the output
    x_rows: Any
    row_bytes: Any  # bytes from one row of x to the next
    valid_bytes: Any  # bytes of a row that are elements of it


@cuda.jit(device=True)
def index_slot(row):
    """Slot of a row's index in shared memory: the four indices that a lane needs in sequence lie side by side."""
    return int32((row & ~15) | (row & 3) << 2 | (row >> 2 & 3))


@cache
def make_load_row_indices(config, layout):
    """Make ``load_row_indices(smem, offset, lane, source, tile)``.

    The warp copies the row indices of a tile to ``smem.i32[offset]`` and replaces invalid ones, which stand for a row
    of zeros, by -1.
    """
    m_subtiles, indices_per_lane, pitch = config.m_subtiles, -(-config.subtile_m // 32), layout.row_index_pitch
    count = indices_per_lane * m_subtiles

    @cuda.jit(device=True)
    def load_row_indices(smem, offset, lane, source, tile):
        loaded = cuda.local.array(count, int32)
        for p in range(m_subtiles):  # issue all loads before the first use, so that their latencies overlap
            for i in range(indices_per_lane):
                t = int32(lane + 32 * i)
                row = int32(p * tile.subtile_rows + t)
                valid = t < tile.subtile_rows and row < tile.rows
                loaded[indices_per_lane * p + i] = source.row_indices[tile.row + row] if valid else int32(-1)
        for p in range(m_subtiles):
            for i in range(indices_per_lane):
                index = loaded[indices_per_lane * p + i]
                slot = uint32(offset + p * pitch + index_slot(int32(lane + 32 * i)))
                smem.i32[slot] = index if index < source.x_rows else int32(-1)
        cuda.syncwarp()

    return load_row_indices


@cache
def make_copy_rows(config, layout):
    """Make ``copy_rows(smem, offset, lane, stage, k_block, source, tile)``.

    The warp issues the ``cp.async`` copies of a stage. Eight lanes copy the 128 bytes of a row, 16 bytes each.
    """
    stage_bytes, x_offset, subtile_bytes = layout.stage_bytes, layout.x_offset, layout.subtile_bytes
    m_subtiles, pitch = config.m_subtiles, layout.row_index_pitch

    @cuda.jit(device=True)
    def copy_vector(smem, offset, x, index, min_index, row_bytes):
        size = 16 if index >= min_index else 0  # cp.async fills the rest of the 16 bytes with zeros
        cp_async_16(smem.u8, offset, x, uint64(uint32(index)) * uint64(uint32(row_bytes)), size)

    @cuda.jit(device=True)
    def copy_rows(smem, offset, lane, stage, k_block, source, tile):
        vector, t = int32(lane & 7), int32(lane >> 3)
        begin = int32(k_block * BLOCK_K_BYTES + 16 * vector)
        inside = begin < source.valid_bytes
        x = advance(source.x, begin if inside else int32(0))
        min_index = int32(0 if inside else 0x7FFFFFFF)  # beyond the end of k every index selects zeros
        for p in range(m_subtiles):
            even = int32(stage * stage_bytes + x_offset + p * subtile_bytes + t * BLOCK_K_BYTES + ((vector ^ t) << 4))
            odd = int32(even ^ 4 << 4)  # for row t + 4: the swizzle depends on the row modulo 8
            slot = int32(offset + p * pitch + 4 * t)
            left = int32(min(tile.subtile_rows, tile.rows - p * tile.subtile_rows) - t)
            while left + t > 0:
                a, b, c, d = ld_shared_s32x4(smem.i32, slot)
                if left > 0:
                    copy_vector(smem, even, x, a, min_index, source.row_bytes)
                if left > 4:
                    copy_vector(smem, int32(odd + 4 * BLOCK_K_BYTES), x, b, min_index, source.row_bytes)
                if left > 8:
                    copy_vector(smem, int32(even + 8 * BLOCK_K_BYTES), x, c, min_index, source.row_bytes)
                if left > 12:
                    copy_vector(smem, int32(odd + 12 * BLOCK_K_BYTES), x, d, min_index, source.row_bytes)
                slot, left = int32(slot + 16), int32(left - 16)
                even, odd = int32(even + 16 * BLOCK_K_BYTES), int32(odd + 16 * BLOCK_K_BYTES)
        cp_async_commit_group()

    return copy_rows


@cuda.jit(device=True)
def wait_rows():
    """Wait for this lane's copies and make them visible to wgmma; the caller then synchronises the warp."""
    cp_async_wait_all()
    fence_proxy_async_shared()
