"""``update_grouped_tma``, which runs before the document's grouped GEMM: tensor maps for every group, tiles counted.

A map says where a tensor lies. A group's rows begin where those of the group before it end, so the host, which does not
know the lengths, cannot make their map. Here a copy of a map gets another address and number of rows in shared memory.
"""

from functools import cache

from numba import cuda, int32, int64, uint8, uint32

from moe_numba.ptx.memory import griddepcontrol_launch_dependents
from moe_numba.ptx.tensormap import (
    make_tensormap_replace_global_dim,
    tensormap_cp_fenceproxy,
    tensormap_replace_global_address,
)
from moe_numba.ptx.warp import warp_inclusive_scan

GROUPS_PER_THREAD = 8  # of the scan, so 256 groups at most
MAP = 128  # bytes
THREADS, SHARED_BYTES = 32, 2 * MAP


@cache
def make_update_grouped_tma(tokens):
    """``update_grouped_tma``: groups + 1 blocks of 32 threads, and 256 bytes of shared memory.

    Block g makes group g's maps: that of its tokens at byte ``256 g`` of ``maps``, that of its results 128 bytes on.
    ``map_x`` and ``map_y`` are the whole tensors' maps. The last block writes each group's tiles of ``tokens`` tokens,
    and how many there are before each group, with their sum behind.
    """
    replace_rows = make_tensormap_replace_global_dim(1)

    @cuda.jit(device=True)
    def count_tiles(seqlens, tiles, cu_tiles, groups):
        lane = int32(cuda.threadIdx.x)
        first, mine = int32(lane * GROUPS_PER_THREAD), int32(0)
        for i in range(GROUPS_PER_THREAD):
            if first + i < groups:
                count = int32(uint32(seqlens[first + i] + tokens - 1) // uint32(tokens))
                tiles[first + i] = count
                mine = int32(mine + count)
        total = warp_inclusive_scan(mine, lane)
        before = int32(total - mine)
        for i in range(GROUPS_PER_THREAD):
            if first + i < groups:
                cu_tiles[first + i] = before
                before = int32(before + tiles[first + i])
        if lane == 31:
            cu_tiles[groups] = total

    @cuda.jit
    def update_grouped_tma(map_x, map_y, maps, x, y, seqlens, cu_seqlens, tiles, cu_tiles, groups, n, k):
        copies = cuda.shared.array(0, uint8, 1024)
        lane, g = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        griddepcontrol_launch_dependents()
        if g == groups:
            count_tiles(seqlens, tiles, cu_tiles, groups)
        else:
            for i in range(lane, MAP, 32):
                copies[i] = map_x[i]
                copies[MAP + i] = map_y[i]
            cuda.syncwarp()
            rows, first = max(seqlens[g], int32(1)), int64(cu_seqlens[g])  # of no rows there is no map: it goes unused
            if lane == 0:
                tensormap_replace_global_address(copies, 0, x, first * k)
                replace_rows(copies, 0, rows)
            if lane == 1:
                tensormap_replace_global_address(copies, MAP, y, first * n)
                replace_rows(copies, MAP, rows)
            cuda.syncwarp()
            tensormap_cp_fenceproxy(maps, 2 * MAP * g, copies, 0)
            tensormap_cp_fenceproxy(maps, 2 * MAP * g + MAP, copies, MAP)

    return update_grouped_tma
