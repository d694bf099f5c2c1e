"""How a block walks over the tiles of all groups: device functions that say which are its own, and what they hold."""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.grouped_gemm.constants import THREADS, WARPS
from moe_numba.grouped_gemm.schedule import device
from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.warp import warp_inclusive_scan

FULL = 0xFFFFFFFF  # lanes of a warp

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
            tiles = warp_inclusive_scan(tiles, lane)
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
