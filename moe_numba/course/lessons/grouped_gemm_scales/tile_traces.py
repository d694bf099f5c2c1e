"""Traces of tiles: when each CTA of a grouped GEMM computed which tile, and what that means for the L2 cache.

A trace comes from `block_scale_diagnoses.make_traced_consumer`. The model of the L2 cache replays it: a tile reads its
blocks of weight and of x one after the other, evenly spread over its time, and the cache evicts the least recently used
block. The hardware's policy is not published, and each half of the L2 may hold a copy, so this is an estimate.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch

BLOCK_K = 128  # bytes of a row in one stage
BOX_ROWS = 64  # rows of x are loaded in boxes


class Tile(NamedTuple):
    """A tile of the output: rows ``row`` to ``row + rows`` by tile ``column`` of the columns."""

    group: int
    row: int
    rows: int
    column: int
    cta: int
    start_us: float
    end_us: float


def tiles_of(trace: torch.Tensor, seqlens: torch.Tensor) -> list[Tile]:
    """Return the tiles of a trace in the order of their start; the first one starts at 0.

    ``trace`` is int32 [rows, tiles of columns, 3], see `StepLaunch`, and ``seqlens`` has the rows of each group.
    """
    trace, ends = trace.cpu(), seqlens.cpu().cumsum(0)
    starts = sorted(set(trace[..., 2].nonzero()[:, 0].tolist()) | {len(trace)})
    next_row = dict(zip(starts, starts[1:]))
    found, reference = [], None
    for row, column in trace[..., 2].nonzero().tolist():
        start, end, cta = trace[row, column].tolist()
        reference = start if reference is None else reference
        # Times have 31 bits and may wrap around.
        start, end = (((t - reference + (1 << 30)) & 0x7FFFFFFF) - (1 << 30) for t in (start, end))
        group = int((ends <= row).sum())
        rows = min(next_row[row], int(ends[group])) - row
        found.append(Tile(group, row, rows, column, cta - 1, start / 1e3, end / 1e3))
    first = min(tile.start_us for tile in found)
    found = [t._replace(start_us=t.start_us - first, end_us=t.end_us - first) for t in found]
    return sorted(found, key=lambda tile: tile.start_us)


def lags(tiles: Iterable[Tile]) -> list[float]:
    """Return the microseconds between the first and the last start of tiles that read the same weights.

    Weights that only one tile reads have no lag and are left out.
    """
    starts: dict = {}
    for tile in tiles:
        starts.setdefault((tile.group, tile.column), []).append(tile.start_us)
    return [max(times) - min(times) for times in starts.values() if len(times) > 1]


def dram_bytes(tiles: Iterable[Tile], columns: int, k: int, l2_bytes: int) -> tuple[int, int]:
    """Return the bytes that the model of the L2 cache reads from DRAM, and those that it must read at least once.

    ``columns`` are those of a tile, ``k`` the bytes of a row, and ``l2_bytes`` the size of the cache.
    """
    accesses = []
    for tile in tiles:
        blocks, x_bytes = -(-k // BLOCK_K), -(-tile.rows // BOX_ROWS) * BOX_ROWS * BLOCK_K
        step = (tile.end_us - tile.start_us) / blocks
        for block in range(blocks):
            time = tile.start_us + block * step
            accesses.append((time, ("weight", tile.group, tile.column, block), columns * BLOCK_K))
            accesses.append((time, ("x", tile.row, block), x_bytes))
    cache: OrderedDict = OrderedDict()
    held, read, once, seen = 0, 0, 0, set()
    for _, block, size in sorted(accesses, key=lambda access: access[0]):
        if block in cache:
            cache.move_to_end(block)
            continue
        read, held, cache[block] = read + size, held + size, size
        if block not in seen:
            seen.add(block)
            once += size
        while held > l2_bytes:
            held -= cache.popitem(last=False)[1]
    return read, once


def pairs_of(rows, n_tiles):
    """Return the pairs of tiles of a group, as the kernel's scheduler makes them: [shares weights, tile 0, tile 1].

    A tile is (first row, rows, tile of columns); rows are 0 if the CTA has nothing to do.
    """
    blocks = -(-rows // 64)
    sharing, left = divmod(blocks, 4)
    if left > 2:
        sharing, left = sharing + 1, 0
    made = []
    for column in range(0, n_tiles + n_tiles % 2, 2):
        for second in range(2):
            for pair in range(sharing):
                begin, end = 4 * pair, min(4 * pair + 4, blocks - left)
                edges = [min(64 * edge, rows) for edge in (begin, (begin + end + 1) // 2, end)]
                tiles = [(a, b - a, column + second) for a, b in zip(edges, edges[1:])]
                made.append([True, *tiles])
        if left:
            begin = 64 * (blocks - left)
            made.append([False, *((begin, rows - begin, column + rank) for rank in range(2))])
    return [pair for pair in made if pair[1][2] < n_tiles]


def l2_to_sm_bytes(lengths: Iterable[int], n: int, k: int, columns: int, cluster_size: int = 1) -> int:
    """Return the bytes that L2 sends to the SMs for tiles of 128 rows by ``columns``, of single CTAs or in pairs."""
    n_tiles, total = -(-n // columns), 0
    boxes = lambda rows: -(-rows // BOX_ROWS) * BOX_ROWS
    for length in lengths:
        if cluster_size == 1:
            total += n_tiles * sum(columns + boxes(min(128, length - at)) for at in range(0, length, 128))
        else:
            for shares, first, second in pairs_of(length, n_tiles):
                total += columns * (1 if shares else 2) + boxes(first[1]) + boxes(second[1])
    return total * k
