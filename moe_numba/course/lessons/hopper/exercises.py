"""Exercises of notebook 05, on TMA, mbarriers, the swizzle and proxies."""

import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint8, uint32, uint64

from moe_numba.course.exercises import Exercise
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

_SEEDS = 4
_NOT_WRITTEN = 255  # no byte of a result
wait_until_read = make_bulk_wait_group_read(0)


def _fault(kernel, threads, wanted, arguments_of, findings):
    """Run a kernel with several thread orders; return what is wrong, or None.

    ``arguments_of(out)`` are its arguments. ``findings`` has a sentence for each error of the simulator that is likely.
    """
    for seed in range(_SEEDS):
        out = torch.full_like(wanted, _NOT_WRITTEN)
        try:
            with simulator.seed(seed):
                launch(kernel, 1, threads, *arguments_of(out))
        except simulator.SimulatorError as error:
            if (kind := type(error).__name__) not in findings:
                raise
            first, *waiting = str(error).splitlines()  # a Deadlock lists what threads wait for
            where = (waiting or [first])[0].strip().partition("; nothing orders")[0]
            return f"{findings[kind]} ({kind}: {where})"
        if len(wrong := (out != wanted).nonzero()):
            row, column = wrong[0].tolist()
            byte = f"with the thread order of seed {seed}, byte {column} of row {row % 8} of box {row // 8}"
            if out[row, column] == _NOT_WRITTEN:
                return f"{byte} is not written; it must be {wanted[row, column]}"
            return f"{byte} is {out[row, column]}, not {wanted[row, column]}"
    return None


def _matrix(rows):
    return (torch.arange(rows * 128) % 251).to(torch.uint8).view(rows, 128)


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


_LOAD_FINDINGS = {
    "Deadlock": "threads wait for a phase that never completes",
    "BarrierMisuse": "a barrier gets arrivals or bytes that it does not expect, or is used wrongly",
    "DataRace": "a stage is read before its copy has completed, or filled again before it has been read",
    "AsyncRace": "a stage is read before its copy has completed, or filled again before it has been read",
}


def _loads_all(kernel):
    return _loads(kernel, 40) or _loads(kernel, 36)


def _loads(kernel, rows):
    x, boxes = _matrix(rows), -(-rows // 8)
    wanted = torch.zeros(8 * boxes, 128, dtype=torch.uint8)
    wanted[:rows] = x
    arguments_of = lambda out: (TensorMap(x, (8, 128)), out.view(-1), rows, boxes)
    wrong = _fault(kernel, 64, wanted, arguments_of, _LOAD_FINDINGS)
    return wrong and f"a matrix of {rows} rows: {wrong}"


# 2: a swizzle of rows of 64 bytes


def place_of_chunk(row, chunk):
    return chunk ^ row // 2 % 4


def _has_no_bank_conflicts(answer):
    used = {}  # (chunk, group of 8 rows, first bank) -> row
    for row in range(64):
        places = [answer(row, chunk) for chunk in range(4)]
        if ... in places:
            return "not answered yet: return a place from 0 to 3"
        for chunk, place in enumerate(places):
            if place not in range(4):
                return f"chunk {chunk} of row {row} goes to place {place}; a row has the places 0 to 3"
            if (other := places.index(place)) != chunk:
                return f"row {row}: chunks {other} and {chunk} both go to place {place}"
            bank = 16 * (row % 2) + 4 * int(place)
            if (other := used.setdefault((chunk, row // 8, bank), row)) != row:
                return f"chunk {chunk} of rows {other} and {row} is in the same banks, {bank} to {bank + 3}"
    return None


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


_STORE_FINDINGS = {
    "MissingFence": "TMA reads bytes that the thread which wrote them has not fenced for the async proxy",
    "DataRace": "TMA reads the tile while a thread may write it",
    "AsyncRace": "TMA reads the tile while a thread may write it",
}


def _stores_all(kernel):
    x = _matrix(32)
    arguments_of = lambda y: (x.view(-1), TensorMap(y, (8, 128)), 4)
    return _fault(kernel, 64, x + 1, arguments_of, _STORE_FINDINGS)


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


_ROLE_FINDINGS = {
    "Deadlock": "a warp waits for a phase that never completes, or has missed one",
    "DataRace": "a stage is filled again while a consumer may still read it, or read while it is filled",
    "AsyncRace": "a stage is filled again while a consumer may still read it, or read while it is filled",
}


def _copies_all(kernel):
    x = _matrix(48)
    arguments_of = lambda out: (TensorMap(x, (8, 128)), out.view(-1), 6)
    return _fault(kernel, 96, x, arguments_of, _ROLE_FINDINGS)


EXERCISES = {
    1: Exercise(
        "a kernel that copies the boxes of a matrix through two stages",
        _loads_all,
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
        _stores_all,
        "Which threads write the tile, and which one waits until TMA has read it? The fence is for the writers; all "
        "threads must know of the wait before they write the next tile.",
        add_one,
    ),
    4: Exercise(
        "a kernel in which one warp loads boxes and two warps copy them to out",
        _copies_all,
        "How many arrivals does each use of a stage bring? An arrival on empty says that all lanes of the warp have "
        "read the stage: cuda.syncwarp() orders the reads of its lanes.",
        copy_by_roles,
    ),
}
