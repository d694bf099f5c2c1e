"""Exercises of the lesson "Grouped GEMM"; the page checks answers with `exercises.<name>`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint8, uint32, uint64

from moe_numba.course.grader import expect_equal
from moe_numba.course.lessons.grouped_gemm import answers, runs
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.update_grouped_tma import make_update_grouped_tma
from moe_numba.course.lessons.grouped_gemm.runs import Table, Tile
from moe_numba.course.lessons.grouped_gemm.sizes import BAND, BUFFER_BYTES, CHUNK, MAP_BYTES, MAPS_BYTES, ROWS
from moe_numba.course.steps.exercises import Build, Choose, Predict
from moe_numba.course.steps.verdict import RIGHT, WRONG
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap


def _counted(run: Callable[[], object]):
    """Return what the simulator counts of the one kernel that a function launches."""
    with simulator.profile() as profile:
        run()
    return profile.kernels[-1]


def _first_tiles(counts):
    return torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)


# Build: which group has a tile

_AT = 5  # where the table begins in shared memory, in words
_COUNTS = (  # tiles of rows of each group
    [3, 0, 4, 2],
    [0, 0, 1],
    [1],
    [2, 0, 0],
    [(7 * g) % 4 for g in range(32)],
)


def _around_group_of(answer):
    @cuda.jit
    def around(first, out, groups, tiles):
        words, lane = cuda.shared.array(512, int32), int32(cuda.threadIdx.x)
        for g in range(lane, groups + 1, 32):
            words[_AT + g] = first[g]
        cuda.syncthreads()
        for m in range(tiles):  # all lanes ask for the same tile, as those of a consumer warp do, or only one lane
            if cuda.threadIdx.x == 0 or cuda.blockIdx.x == 0:
                out[cuda.blockIdx.x * tiles + m] = answer(Table(words, int32(_AT), groups), int32(m))

    return around


def _groups_of(answer, counts):
    out = torch.full((2, sum(counts)), -1, dtype=torch.int32)
    launch(_around_group_of(answer), 2, 32, _first_tiles(counts), out.view(-1), len(counts), out.shape[1])
    return out.numpy(), np.repeat(np.arange(len(counts)), counts)


def _test_group_of(answer):
    for counts in _COUNTS:
        out, right = _groups_of(answer, counts)
        for callers, found in zip(("all lanes", "one lane"), out, strict=True):
            expect_equal(f"tiles of each group {counts}, called by {callers}: the groups of all tiles", found, right)


def _loads_of_a_search(answer):
    """Count the search for the last tile of 32 groups, the one for which a walk through the table is longest."""
    out = torch.zeros(1, dtype=torch.int32)
    first = _first_tiles([1] * 32)

    @cuda.jit
    def last(first, out):
        words, lane = cuda.shared.array(512, int32), int32(cuda.threadIdx.x)
        words[_AT + lane] = first[lane]
        if lane == 0:
            words[_AT + 32] = first[32]
        cuda.syncthreads()
        out[0] = answer(Table(words, int32(_AT), int32(32)), int32(31))

    return _counted(lambda: launch(last, 1, 32, first, out))


group_of = Build(
    "group of a tile",
    "a function that looks up the group of a tile in the table",
    own=answers.group_of,
    test=_test_group_of,
    profile=_loads_of_a_search,
    counter="shared_load_requests",
    par=6,
    needs=(("shared_load_requests",), "it does not look at the table in shared memory"),
    most_alone=None,
    over_par="The table is sorted. How many entries must you read to halve what is left?",
    hint="Look for the last group that begins at m or before it. A group without rows begins where the next one does, "
    "so the last such group is the one that has rows.",
    seeds=2,
    home=f"{__name__}:group_of",
)


# Build: count the tiles


def _around_count(answer):
    @cuda.jit
    def around(lengths, first, groups, tokens):
        answer(lengths, groups, tokens, first, int32(_AT))

    return around


def _count(answer, groups, tokens):
    lengths = torch.tensor([(g * g * 37 + 11 * g) % 300 * (g % 5 > 0) for g in range(groups)], dtype=torch.int32)
    first = torch.full((_AT + groups + 2,), -1, dtype=torch.int32)
    launch(_around_count(answer), 1, 32, lengths, first, groups, tokens)
    right = first.clone().fill_(-1)
    right[_AT:-1] = _first_tiles(-(-lengths.numpy() // tokens))
    return first.numpy(), right.numpy()


def _test_count(answer):
    for groups, tokens in ((5, 64), (1, 16), (32, 96), (40, 128), (256, 64)):
        first, right = _count(answer, groups, tokens)
        expect_equal(f"{groups} groups, tiles of {tokens} rows, at = {_AT}: first", first, right)


count_tiles = Build(
    "count tiles",
    "a function in which a warp stores the number of tiles before each group",
    own=answers.count_tiles,
    test=_test_count,
    profile=lambda answer: _counted(lambda: _count(answer, 256, 64)),
    counter="shuffles",
    par=5,
    forbidden={"global_atomic_requests": "it adds in global memory, one address after the other"},
    limits={"global_load_requests": (16, "lanes load the lengths of other lanes' groups")},
    needs=(
        ("shuffles", "shared_load_requests", "shared_atomic_requests"),
        "no lane gets a sum from another lane, so each must have added up the groups of others",
    ),
    over_par="What can a lane add up alone, before the warp makes one scan?",
    hint="Give each lane neighbouring groups. It adds up their tiles, a scan over lanes tells it what comes before, "
    "and then it goes through its groups again. The sum behind the last lane is the total.",
    seeds=2,
    home=f"{__name__}:count_tiles",
)


# Build: the place of a tile

_LENGTHS, _WIDTH, _BOX = (11, 0, 20, 5), 128, 1024  # rows of groups, bytes of a row and of eight rows
_TILES = ((0, 0), (0, 8), (2, 0), (2, 16), (3, 0))  # group, first row in the group


def _around_place(answer):
    @cuda.jit
    def around(maps, tiles, starts, out, count):
        smem, barrier = cuda.shared.array(_BOX, uint8, 1024), cuda.shared.array(1, uint64)
        lane = int32(cuda.threadIdx.x)
        if lane == 0:
            mbarrier_init(barrier, 0, 1)
            fence_mbarrier_init()
        cuda.syncwarp()
        for i in range(2 * count):
            which = int32(MAP_BYTES) if i >= count else int32(0)
            at = int32(i - count if i >= count else i)
            if lane == 0:
                tile = Tile(tiles[2 * at], tiles[2 * at + 1], int32(8), int32(0))
                index, row = answer(maps, which, starts, tile)
                mbarrier_arrive_expect_tx(barrier, 0, _BOX)
                tma_load_2d(smem, 0, maps, index, 0, row, barrier, 0)
            mbarrier_wait_parity(barrier, 0, uint32(i & 1))
            for j in range(lane, _BOX, 32):
                out[_BOX * i + j] = smem[j]
            cuda.syncwarp()

    return around


@cache
def _two_matrices():
    rows = sum(_LENGTHS)
    x = (torch.arange(rows * _WIDTH) // _WIDTH + 1).to(torch.uint8).view(rows, _WIDTH)
    return x, (x + 100).contiguous()


def _place(answer):
    (x, y), groups = _two_matrices(), len(_LENGTHS)
    lengths, starts = torch.tensor(_LENGTHS, dtype=torch.int32), _first_tiles(_LENGTHS)
    memory = torch.zeros((2 * groups + 1) * MAP_BYTES, dtype=torch.uint8)
    maps = memory[-memory.data_ptr() % MAP_BYTES :][: groups * MAPS_BYTES]
    counts = torch.zeros_like(lengths), torch.zeros_like(starts)
    given = maps, x, y, lengths, starts, *counts, groups, _WIDTH, _WIDTH
    templates = (TensorMap(each, (8, _WIDTH)) for each in (x, y))
    launch(make_update_grouped_tma(8), groups + 1, 32, *templates, *given, shared_bytes=MAPS_BYTES)
    out = torch.full((2 * len(_TILES), 8, _WIDTH), 255, dtype=torch.uint8)
    tiles = torch.tensor(_TILES, dtype=torch.int32).view(-1)
    launch(_around_place(answer), 1, 32, maps, tiles, starts, out.view(-1), len(_TILES))
    right = torch.zeros_like(out[:, :, 0])
    for i, (group, row) in enumerate(_TILES * 2):
        own = (x, y)[i // len(_TILES)][starts[group] + row : starts[group + 1]][:8, 0]
        right[i, : len(own)] = own
    return out[:, :, 0].numpy(), right.numpy()


def _test_place(answer):
    out, right = _place(answer)
    for i, (group, row) in enumerate(_TILES * 2):
        name = f"the map of {'xy'[i // len(_TILES)]}, group {group}, tile at its row {row}: rows loaded (0: zeros)"
        expect_equal(name, out[i], right[i])


@dataclass(frozen=True)
class Place(Build):
    """A `Build` that is right or wrong: a tile has one place."""

    def judge(self, answer):
        """Return the state, a sentence and no score of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        return RIGHT, "right: each map is acquired, and rows count from where its group begins", None


place = Place(
    "place of a tile",
    "a function that acquires a map of the tile's group, and returns its index and the tile's row in it",
    own=answers.place_in_group,
    test=_test_place,
    profile=lambda answer: None,  # type: ignore[arg-type,return-value]
    counter="",
    par=0,
    hint="The map of a group begins at the group's first row. Where, counted from there, does the tile begin? Make the "
    "index an int64.",
    seeds=2,
    home=f"{__name__}:place",
)


# Build: bands


def _around_order(answer):
    @cuda.jit
    def around(first, out, groups, n_tiles, tiles):
        words, lane = cuda.shared.array(512, int32), int32(cuda.threadIdx.x)
        for g in range(lane, groups + 1, 32):
            words[_AT + g] = first[g]
        cuda.syncthreads()
        for number in range(tiles):
            group, m, n = answer(Table(words, int32(_AT), groups), n_tiles, int32(number))
            out[3 * number] = group
            out[3 * number + 1] = m
            out[3 * number + 2] = n

    return around


def _ordered(answer, counts, n_tiles):
    tiles = sum(counts) * n_tiles
    out = torch.full((tiles, 3), -1, dtype=torch.int32)
    launch(_around_order(answer), 1, 32, _first_tiles(counts), out.view(-1), len(counts), n_tiles, tiles)
    return out.numpy()


def _in_bands(counts, n_tiles):
    rows = [(g, m) for g, count in enumerate(counts) for m in range(count)]
    bands = [rows[at : at + BAND] for at in range(0, len(rows), BAND)]
    return [(g, m, n) for band in bands for n in range(n_tiles) for g, m in band]


def _test_bands(answer):
    for counts, n_tiles in (([2, 0, 3, 1, 5], 3), ([BAND], 2), ([1, 1], 4), ([0, 3 * BAND - 1, 0], 1)):
        out, right = _ordered(answer, counts, n_tiles), _in_bands(counts, n_tiles)
        for number, tile in enumerate(right):
            name = f"tiles of rows {counts}, n_tiles = {n_tiles}, tile {number}: (group, m, n)"
            expect_equal(name, out[number], np.array(tile))


def _loads_of_an_order(answer):
    """Count one lookup, of the last tile of 32 groups; filling the table needs no loads from shared memory."""

    @cuda.jit
    def last(first, out, n_tiles, number):
        words, lane = cuda.shared.array(512, int32), int32(cuda.threadIdx.x)
        for g in range(lane, 33, 32):
            words[_AT + g] = first[g]
        cuda.syncthreads()
        group, m, n = answer(Table(words, int32(_AT), int32(32)), n_tiles, number)
        out[0] = int32(group + m + n)

    out = torch.zeros(1, dtype=torch.int32)
    return _counted(lambda: launch(last, 1, 32, _first_tiles([2] * 32), out, 4, 255))


bands = Build(
    "bands",
    f"a function that returns the tile with a number, in bands of {BAND} tiles of rows",
    own=answers.in_bands,
    test=_test_bands,
    profile=_loads_of_an_order,
    counter="shared_load_requests",
    par=9,
    needs=(("shared_load_requests",), "it does not look at the table in shared memory"),
    limits={"executions": (200, "it walks through tiles until it arrives at the number")},
    most_alone=None,
    over_par="One entry for the number of tiles, a search for the group, and one entry for its first tile are enough.",
    hint="A whole band has BAND * n_tiles tiles. Divide by that, then divide what is left by the tiles of rows of this "
    "band, which are fewer in the last one. m then counts all groups' tiles: group_of, and subtract.",
    seeds=1,
    home=f"{__name__}:bands",
)


# Build: store the rows of a tile

_COLUMNS, _Y_ROWS, _WORDS = 256, 40, BUFFER_BYTES  # words of four buffers


def _around_store(answer):
    @cuda.jit
    def around(values, y, row, rows, column, pitch, buffer):
        words, thread = cuda.shared.array(_WORDS, int32, 1024), int32(cuda.threadIdx.x)
        for i in range(thread, CHUNK * 32, 128):  # words of 16 rows
            r, v = int32(i >> 5), int32(i >> 2 & 7)
            words[(buffer >> 2) + 32 * r + ((v ^ (r & 7)) << 2) + (i & 3)] = values[i]
        cuda.syncthreads()
        answer(words, buffer, y, row, rows, column, pitch)

    return around


def _store(answer, row, rows, column, buffer):
    values = torch.arange(CHUNK * 32, dtype=torch.int32) + 1
    y = torch.full((_Y_ROWS, _COLUMNS // 2), -1, dtype=torch.int32)
    launch(_around_store(answer), 1, 128, values, y.view(-1), row, rows, column, _COLUMNS // 2, buffer)
    right = torch.full_like(y, -1)
    count = max(0, min(rows, CHUNK))
    right[row : row + count, column // 2 : column // 2 + 32] = values.view(CHUNK, 32)[:count]
    return y.numpy(), right.numpy()


def _test_store(answer):
    cases = ((3, 16, 64, 0), (0, 5, 128, BUFFER_BYTES), (7, 40, 0, 3 * BUFFER_BYTES), (9, 0, 192, 0), (4, -11, 64, 0))
    for row, rows, column, buffer in cases:
        y, right = _store(answer, row, rows, column, buffer)
        for r in range(_Y_ROWS):
            whose = "one of the rows" if row <= r < row + min(rows, CHUNK) else "a row of another group"
            name = f"row = {row}, rows = {rows}, column = {column}: words of row {r} of y, {whose} (-1: not written)"
            expect_equal(name, y[r], right[r])


store_chunk = Build(
    "rows of a tile",
    "a function that stores the rows of a tile, and no others",
    own=answers.store_chunk,
    test=_test_store,
    profile=lambda answer: _counted(lambda: _store(answer, 3, 16, 64, 0)),
    counter="global_store_requests",
    par=1,
    over_par="A row has 128 bytes, eight lanes store 16 each. How many rows can a warp store at once?",
    hint="Thread t of the 128 has vector t % 8 of row t // 8. Is that row one of the tile's?",
    seeds=2,
    home=f"{__name__}:store_chunk",
)


# Predict: tiles and padding


def _tiles_and_padding():
    count = runs.tiles_of(runs.lengths_of(ROWS), 128)
    return {"tiles": count, "percent": round(100 * (1 - ROWS / (128 * count)))}


_PADDING = (
    "Each group with rows has its length divided by 128 and rounded up; a tile counts whole, however few rows it has."
)
padding = Predict("padding", _tiles_and_padding, _PADDING, within={"percent": 3})


# Diagnose: a store of whole chunks


_CHUNKS = (
    "Two CTAs write the same rows of y, one of them with the weights of the wrong group, and nothing orders them. "
    "A test on one GPU may pass. Rows behind the last group are written, too"
)
whole_chunks = Choose(
    "whole chunks",
    {
        "A": "nothing: each row is also stored by the tile of its own group",
        "B": "the rows behind the end of a group depend on which tile is stored last",
        "C": "the last rows of each group are wrong",
        "D": "the kernel waits forever",
    },
    "B",
    lambda version: f"{_CHUNKS}.\n{runs.lesson.orders(version, seeds=2)}",
)


# Predict: even tiles


def _why_even():
    tiles = runs.tiles_of(runs.lengths_of(ROWS), 96)
    work = f"Both cuts make {tiles} tiles of rows of the groups of this page"
    return f"{work}, and each tile loads 96 rows, multiplies 96 rows, and stores its own: the sums are the same."


even = Choose(
    "even tiles", {"A": "it becomes faster", "B": "nothing changes", "C": "it becomes slower"}, "B", _why_even
)
