"""Our Numba port of hpc-ops' ``update_grouped_tma``, which prepares tensor maps and tile counts for the grouped GEMM.

Each group needs tensor maps whose address and number of rows depend on the group sizes, which the host does not know.
The kernel copies a template map to shared memory, replaces these two fields and writes the map to global memory.
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

GROUPS_PER_THREAD = 8  # in the scan by one warp: at most 256 groups
MAP_BYTES = 128
THREADS, SHARED_BYTES = 32, 2 * MAP_BYTES


@cache
def make_update_grouped_tma(tile_m):
    """Make ``update_grouped_tma``, for groups + 1 CTAs of 32 threads and 256 bytes of dynamic shared memory.

    CTA g writes group g's map of x at byte ``256 g`` of ``maps``, and its map of y 128 bytes behind. ``map_x`` and
    ``map_y`` are the templates. The last CTA writes each group's number of tiles of ``tile_m`` rows to ``tiles``, and
    their exclusive prefix sum, followed by the total, to ``cu_tiles``.
    """
    replace_rows = make_tensormap_replace_global_dim(1)

    @cuda.jit(device=True)
    def count_tiles(seqlens, tiles, cu_tiles, groups):
        lane = int32(cuda.threadIdx.x)
        first, count = int32(lane * GROUPS_PER_THREAD), int32(0)
        for i in range(GROUPS_PER_THREAD):
            if first + i < groups:
                group_tiles = int32(uint32(seqlens[first + i] + tile_m - 1) // uint32(tile_m))
                tiles[first + i] = group_tiles
                count = int32(count + group_tiles)
        inclusive = warp_inclusive_scan(count, lane)
        before = int32(inclusive - count)
        for i in range(GROUPS_PER_THREAD):
            if first + i < groups:
                cu_tiles[first + i] = before
                before = int32(before + tiles[first + i])
        if lane == 31:
            cu_tiles[groups] = inclusive

    @cuda.jit
    def update_grouped_tma(map_x, map_y, maps, x, y, seqlens, cu_seqlens, tiles, cu_tiles, groups, n, k):
        smem_maps = cuda.shared.array(0, uint8, 1024)
        lane, g = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        griddepcontrol_launch_dependents()
        if g == groups:
            count_tiles(seqlens, tiles, cu_tiles, groups)
        else:
            for i in range(lane, MAP_BYTES, 32):
                smem_maps[i] = map_x[i]
                smem_maps[MAP_BYTES + i] = map_y[i]
            cuda.syncwarp()
            # A map must have at least one row; the map of an empty group is not used.
            rows, first = max(seqlens[g], int32(1)), int64(cu_seqlens[g])
            if lane == 0:
                tensormap_replace_global_address(smem_maps, 0, x, first * k)
                replace_rows(smem_maps, 0, rows)
            if lane == 1:
                tensormap_replace_global_address(smem_maps, MAP_BYTES, y, first * n)
                replace_rows(smem_maps, MAP_BYTES, rows)
            cuda.syncwarp()
            tensormap_cp_fenceproxy(maps, 2 * MAP_BYTES * g, smem_maps, 0)
            tensormap_cp_fenceproxy(maps, 2 * MAP_BYTES * g + MAP_BYTES, smem_maps, MAP_BYTES)

    return update_grouped_tma
