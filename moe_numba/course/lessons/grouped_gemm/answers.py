"""The lesson's own answers to the exercises of "Grouped GEMM"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, int64, uint32

from moe_numba.course.lessons.grouped_gemm.sizes import BAND, MAPS_BYTES
from moe_numba.grouped_gemm.common.scheduler import divide, num_tiles
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_gpu
from moe_numba.ptx.warp import warp_inclusive_scan


@cuda.jit(device=True)
def group_of(table, m):
    low, high = int32(0), int32(table.groups - 1)
    while low < high:
        middle = int32((low + high + 1) >> 1)
        if table.words[uint32(table.at + middle)] <= m:
            low = middle
        else:
            high = int32(middle - 1)
    return low


@cuda.jit(device=True)
def count_tiles(lengths, groups, tokens, first, at):
    lane = int32(cuda.threadIdx.x & 31)
    each = int32((groups + 31) >> 5)  # neighbouring groups of a lane
    begin, end, own = int32(lane * each), int32(min(int32(lane * each + each), groups)), int32(0)
    for g in range(begin, end):
        own = int32(own + num_tiles(lengths[g], tokens))
    before = int32(warp_inclusive_scan(own, lane) - own)
    for g in range(begin, end):
        first[uint32(at + g)] = before
        before = int32(before + num_tiles(lengths[g], tokens))
    if lane == 31:
        first[uint32(at + groups)] = before


@cuda.jit(device=True)
def place_in_group(maps, which, starts, tile):
    index = int64(MAPS_BYTES) * tile.group + which
    fence_proxy_tensormap_acquire_gpu(maps, index)
    return index, tile.row


@cuda.jit(device=True)
def in_bands(table, n_tiles, number):
    tiles = table.words[uint32(table.at + table.groups)]
    band = divide(number, int32(BAND * n_tiles))
    own, rows = int32(number - band * int32(BAND * n_tiles)), int32(min(BAND, int32(tiles - band * BAND)))
    n = divide(own, rows)
    m = int32(band * BAND + own - n * rows)
    group = group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), n


@cuda.jit(device=True)
def store_chunk(words, buffer, y, row, rows, column, pitch):
    r, v = int32(cuda.threadIdx.x >> 3 & 15), int32(cuda.threadIdx.x & 7)
    if r < rows:
        a, b, c, d = ld_shared_s32x4(words, int32(buffer + 128 * r + ((v ^ (r & 7)) << 4)) >> 2)
        st_global_s32x4(y, int64(row + r) * pitch + int32((column >> 1) + 4 * v), a, b, c, d)
