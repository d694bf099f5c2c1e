"""Exercises of notebook 06, on TMA, mbarriers, the swizzle and proxies."""

from itertools import product

import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint8, uint32, uint64

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, Wrong, kernel_test
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tma import tma_load_2d, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

_SEEDS = 2
wait_until_read = make_bulk_wait_group_read(0)


def _matrix(rows):
    return (torch.arange(rows * 128) % 251).to(torch.uint8).view(rows, 128)


def _not_written(rows):
    return torch.full((rows, 128), 255, dtype=torch.uint8)  # no byte of a result


def _boxes(rows):
    """Return a matrix with all rows of the boxes of the first ``rows``."""
    matrix = torch.zeros(-(-rows // 8) * 8, 128, dtype=torch.uint8)
    matrix[:rows] = _matrix(rows)
    return matrix


# 1: bytes and phases of two barriers


@cuda.jit
def load_two_stages(map_x, out, rows, boxes):
    smem, full = cuda.shared.array(2048, uint8, 1024), cuda.shared.array(2, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(-1, boxes):
        ahead = int32(box + 1)
        if ahead < boxes and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, ahead % 2, 1024)
            tma_load_2d(smem, 1024 * (ahead % 2), map_x, 0, 0, 8 * ahead, full, ahead % 2)
        if box >= 0:
            mbarrier_wait_parity(full, box % 2, uint32(box // 2 % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * (box % 2) + i]
            cuda.syncthreads()


def _load(rows):
    def load(kernel, x, out):
        launch(kernel, 1, 64, TensorMap(x, (8, 128)), out.view(-1), rows, len(out) // 8)

    wanted = _boxes(rows)
    return Run(load, {"x": _matrix(rows), "out": _not_written(len(wanted))}, {"out": wanted}, f"{rows} rows")


# 2: a swizzle of rows of 64 bytes


def place_of_chunk(row, chunk):
    return chunk ^ row // 2 % 4


def _has_no_bank_conflicts(answer):
    places = [[answer(row, chunk) for chunk in range(4)] for row in range(64)]
    for row, of_row in enumerate(places):
        if sorted(of_row) != [0, 1, 2, 3]:
            raise Wrong(f"the chunks of row {row} have the places {of_row}; each of 0 to 3 is needed once")
    for first, chunk in product(range(0, 64, 8), range(4)):
        used = {}  # first bank -> row
        for row in range(first, first + 8):
            bank = 16 * (row % 2) + 4 * int(places[row][chunk])
            if (other := used.setdefault(bank, row)) != row:
                raise Wrong(f"chunk {chunk} of rows {other} and {row} is in the same banks, {bank} to {bank + 3}")


# 3: a TMA store


@cuda.jit
def add_one(x, map_y, tiles):
    smem = cuda.shared.array(1024, uint8, 128)
    thread = int32(cuda.threadIdx.x)
    for tile in range(tiles):
        for i in range(thread, 1024, 64):
            smem[i] = x[1024 * tile + i] + uint8(1)
        fence_proxy_async_shared()
        cuda.syncthreads()
        if thread < 32 and elect_sync(FULL_MASK):
            tma_store_2d(map_y, 0, 0, int32(8 * tile), smem, 0)
            bulk_commit_group()
            wait_until_read()
        cuda.syncthreads()


_STORE = Run(
    lambda kernel, x, y: launch(kernel, 1, 64, x.view(-1), TensorMap(y, (8, 128)), 4),
    {"x": _matrix(32), "y": _not_written(32)},
    {"y": _matrix(32) + 1},
)


# 4: full and empty barriers


@cuda.jit
def copy_by_roles(map_x, out, boxes):
    smem, barriers = cuda.shared.array(2048, uint8, 1024), cuda.shared.array(4, uint64)
    thread, warp, lane = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
    if thread == 0:
        for stage in range(2):
            mbarrier_init(barriers, stage, 1)
            mbarrier_init(barriers, 2 + stage, 2)
        fence_mbarrier_init()
    cuda.syncthreads()
    if warp < 2:
        for box in range(boxes):
            stage = int32(box % 2)
            mbarrier_wait_parity(barriers, stage, uint32(box // 2 % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * stage + i]
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(barriers, 2 + stage)
    elif elect_sync(FULL_MASK):
        for box in range(boxes):
            stage = int32(box % 2)
            mbarrier_wait_parity(barriers, 2 + stage, uint32(1 - box // 2 % 2))
            mbarrier_arrive_expect_tx(barriers, stage, 1024)
            tma_load_2d(smem, 1024 * stage, map_x, 0, 0, int32(8 * box), barriers, stage)


_COPY = Run(
    lambda kernel, x, out: launch(kernel, 1, 96, TensorMap(x, (8, 128)), out.view(-1), 6),
    {"x": _matrix(48), "out": _not_written(48)},
    {"out": _matrix(48)},
)


EXERCISES = {
    1: Exercise(
        "a kernel that copies the boxes of a matrix through two stages",
        kernel_test(_load(40), _load(36), seeds=_SEEDS),
        "How many bytes does TMA write for a box that ends outside the matrix? Stage 0 has the boxes 0, 2 and 4: which "
        "phase of its barrier does each of them complete?",
        load_two_stages,
    ),
    2: Exercise(
        "a function of a row and a chunk, 0 to 3, that returns the chunk's place in the row, 0 to 3",
        _has_no_bank_conflicts,
        "Two rows fill all 32 banks once. Rows 0 and 1 cannot conflict, so they may be permuted alike; rows 0 and 2 "
        "must differ.",
        place_of_chunk,
    ),
    3: Exercise(
        "a kernel that adds 1 to each byte of a matrix and stores the tiles with TMA",
        kernel_test(_STORE, seeds=_SEEDS),
        "Which threads write the tile, and which one waits until TMA has read it? The fence is for the writers; all "
        "threads must know of the wait before they write the next tile.",
        add_one,
    ),
    4: Exercise(
        "a kernel in which one warp loads boxes and two warps copy them to out",
        kernel_test(_COPY, seeds=_SEEDS),
        "How many arrivals does each use of a stage bring? An arrival on empty says that all lanes of the warp have "
        "read the stage: cuda.syncwarp() orders the reads of its lanes.",
        copy_by_roles,
    ),
}
