"""Exercises of the lesson "A Hopper GEMM"; the page checks answers with `exercises.<name>`."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.course.grader import Wrong, expect_equal
from moe_numba.course.lessons.hopper import answers, runs
from moe_numba.course.lessons.hopper.runs import COMPARES, CTAS, LOOP, REGISTERS, SPILLED, STORES, Ring, advance
from moe_numba.course.lessons.hopper.sizes import A_BYTES, BLOCK_K, BUFFER_BYTES, FREE, WRITTEN
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict, tree_of
from moe_numba.course.steps.score import COMPILER
from moe_numba.course.steps.verdict import OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.accumulators import make_fma, make_for_each_chunk
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group
from moe_numba.ptx.matrix import stmatrix_rows
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tma import tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap
from moe_numba.simulator.profiler.occupancy import gpu_properties, occupancy

# Build: a swizzle of rows of 64 bytes


def _has_no_bank_conflicts(answer):
    places = [[answer(row, chunk) for chunk in range(4)] for row in range(64)]
    for row, of_row in enumerate(places):
        if sorted(of_row) != [0, 1, 2, 3]:
            raise Wrong(f"the chunks of row {row} have the places {of_row}; each of 0 to 3 is needed once")
    for first, chunk in product(range(0, 64, 8), range(4)):
        used: dict[int, int] = {}  # first bank -> row
        for row in range(first, first + 8):
            bank = 16 * (row % 2) + 4 * int(places[row][chunk])
            if (other := used.setdefault(bank, row)) != row:
                raise Wrong(f"chunk {chunk} of rows {other} and {row} is in the same banks, {bank} to {bank + 3}")


_SWIZZLE_HINT = (
    "Two rows fill all 32 banks once. Rows 0 and 1 cannot conflict, so they may be permuted alike; rows 0 and 2 must "
    "differ."
)
swizzle = Formula(
    "swizzle",
    "a function of a row and a chunk",
    answers.place_of_chunk,
    _has_no_bank_conflicts,
    "the same chunk of eight rows lies in all 32 banks",
    _SWIZZLE_HINT,
)


# Build: what is in flight


@dataclass(frozen=True)
class InFlight(Build):
    """A `Build` that is judged by how many loads are in flight at once.

    ``profile(answer)`` returns that number, and ``avoided`` says what an answer with fewer than `par` does.
    """

    avoided: str = ""

    def judge(self, answer):
        """Return the state, a sentence and the score of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        found: Any = self.profile(answer)
        if found < self.par:
            return REFUSED, f"the result is right, but {self.avoided.format(found=found)}", None
        return RIGHT, f"right: {found} {self.unit}", found


def _most_in_flight(run: Callable[[], object]) -> int:
    """Return the most boxes of a launch that are loaded at once, or are there and not waited for yet."""
    with simulator.trace() as events:
        run()
    started, passed, most = 0, set(), 0
    for event in events:
        if event.what == "async copy" and event.details["event"] == "starts":
            started += 1
        elif event.what == "mbarrier.wait":
            passed.add((event.details["barrier"], event.details["phase"]))
        most = max(most, started - len(passed))
    return most


# The third stage


def _matrix(rows):
    return (torch.arange(rows * 128) % 251).to(torch.uint8).view(rows, 128)


def _load(kernel, boxes):
    x, out = _matrix(8 * boxes), torch.full((8 * boxes, 128), 255, dtype=torch.uint8)
    launch(kernel, 1, 64, TensorMap(x, (8, 128)), out.view(-1), boxes)
    return out.numpy(), x.numpy()


def _test_loads(kernel):
    for boxes in (7, 2):
        out, x = _load(kernel, boxes)
        expect_equal(f"{boxes} boxes: out", out, x)


three_stages = InFlight(
    "third stage",
    "a kernel that loads boxes into three stages",
    own=answers.load_three_stages,
    test=_test_loads,
    profile=lambda answer: _most_in_flight(lambda: _load(answer, 7)),  # type: ignore[arg-type,return-value]
    counter="",
    par=3,
    unit="boxes are in flight at once",
    avoided="at most {found} boxes are in flight at once; three stages allow 3",
    most_alone=None,
    hint="Box i goes to stage i % 3, and completes phase i // 3 of its barrier. How many boxes must be under way "
    "before the first one is copied?",
    seeds=2,
    home=f"{__name__}:three_stages",
)


# The producer

_RING_STAGES, _BLOCKS, _TILES = 3, 5, ((0, 128), (128, 0))  # row and column of each tile
_STAGE_BYTES = 2 * A_BYTES
_FULL = _RING_STAGES * _STAGE_BYTES // 8
_PRODUCER_WARP = 2


def _around_producer(answer):
    @cuda.jit
    def around(map_a, map_b, out):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        full, empty = int32(_FULL), int32(_FULL + _RING_STAGES)
        ring = Ring(smem, barriers, full, empty, int32(_RING_STAGES), int32(_STAGE_BYTES))
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for s in range(_RING_STAGES):
                mbarrier_init(barriers, full + s, 1)
                mbarrier_init(barriers, empty + s, 2)
            fence_mbarrier_init()
        cuda.syncthreads()
        stage = int32(0)
        if thread >= 64:
            phase = uint32(1)
            if elect_sync(FULL_MASK):
                stage, phase = answer(ring, map_a, map_b, int32(0), int32(128), int32(_BLOCKS), stage, phase)
                stage, phase = answer(ring, map_a, map_b, int32(128), int32(0), int32(_BLOCKS), stage, phase)
        else:
            phase = uint32(0)
            for s in range(_RING_STAGES):  # no stage is released before all have been filled
                mbarrier_wait_parity(barriers, full + s, phase)
            for block in range(2 * _BLOCKS):
                mbarrier_wait_parity(barriers, full + stage, phase)
                for row in range(thread, 256, 64):
                    out[256 * block + row] = smem[int32(stage * _STAGE_BYTES) + 128 * row]
                cuda.syncwarp()
                if thread & 31 == 0:
                    mbarrier_arrive(barriers, empty + stage)
                stage, phase = advance(ring, stage, phase)

    return around


@cache
def _operands():
    of = lambda factor: (torch.arange(256)[:, None] * factor + torch.arange(_BLOCKS * BLOCK_K) // BLOCK_K * 17) % 251
    return [of(factor).to(torch.uint8).contiguous() for factor in (3, 5)]


def _produce(answer):
    a, b = _operands()
    out = torch.full((2 * _BLOCKS, 2, 128), 255, dtype=torch.uint8)
    maps = (TensorMap(t, (128, 128)) for t in (a, b))
    shared_bytes = _RING_STAGES * (_STAGE_BYTES + 16)
    launch(_around_producer(answer), 1, 96, *maps, out.view(-1), shared_bytes=shared_bytes)
    at = lambda x, row: x[row : row + 128, ::BLOCK_K].T
    tiles = [torch.stack([at(a, row), at(b, column)], 1) for row, column in _TILES]
    return out.numpy(), torch.cat(tiles).numpy()


def _test_producer(answer):
    out, right = _produce(answer)
    for block, operand in product(range(2 * _BLOCKS), (0, 1)):
        name = f"tile {block // _BLOCKS}, block {block % _BLOCKS} of k: the first byte of the rows of {'AB'[operand]}"
        expect_equal(name, out[block, operand], right[block, operand])


def _stages_ahead(answer):
    """Return how many stages a producer fills without waiting for its own loads."""
    with simulator.trace() as events:
        _produce(answer)
    waits = [e for e in events if e.what == "mbarrier.wait" and e.warp == _PRODUCER_WARP]
    own = any(_FULL <= int(e.details["barrier"].split()[1]) < _FULL + _RING_STAGES for e in waits)
    return 1 if own else _RING_STAGES


producer = InFlight(
    "producer",
    "the loop that loads all blocks of k of a tile",
    own=answers.produce,
    test=_test_producer,
    profile=_stages_ahead,  # type: ignore[arg-type]
    counter="",
    par=_RING_STAGES,
    unit="stages are filled before the first one is released",
    avoided="the producer waits for its own loads, so that {found} is in flight at once",
    most_alone=None,
    hint="For each block of k: wait on empty, announce the bytes of the stage on full, issue both loads, advance. B "
    "begins A_BYTES behind A in a stage. Coordinates come innermost first: k, then the row.",
    seeds=2,
    home=f"{__name__}:producer",
)


# Predict: CTAs per SM


_STAGES = {"one": 1, "two": 2, "three": 3, "four": 4}


def _resident_by_stages(score):
    return {name: occupancy.blocks_per_sm for name, occupancy in _occupancies(score).items()}


def _limits(score):
    limits = (f"{name}: {' and '.join(found.limited_by)}" for name, found in _occupancies(score).items())
    return f"What limits the CTAs is, with {', '.join(limits)}."


def _occupancies(score):
    registers = int(score.rows[COMPILER, REGISTERS])
    return {name: _resident(registers, stages) for name, stages in _STAGES.items()}


def _resident(registers, stages):
    version = runs.Version(None, stages=stages)
    return occupancy(gpu_properties("H200"), version.threads, 132, registers, runs.shared_bytes(version))


resident = Predict("resident", _resident_by_stages, _limits)


# Diagnose: a slow tile


def _slow_tile(before, after):
    facts = (f"{row} {before.rows[COMPILER, row]:,} -> {after.rows[COMPILER, row]:,}" for row in _EVIDENCE)
    return f"{'; '.join(facts)}. {_SLOW_TILE}"


_EVIDENCE = LOOP, SPILLED, CTAS, STORES, COMPARES
_SLOW_TILE = (
    "Twice as many accumulators need twice as many store instructions, not fewer. The loop over them was not unrolled. "
    "A register has no index, so each iteration finds its accumulators by a search of compares and branches."
)
slow_tile = Choose(
    "slow tile",
    {
        "A": "the main loop has become longer",
        "B": "the accumulators do not fit, and are spilled",
        "C": "the stores of the epilogue are not what was written",
        "D": "fewer CTAs fit on an SM",
    },
    "C",
    _slow_tile,
)


# Build: stores that the compiler unrolls

_ACCUMULATORS = 128
_STEPS, _ONES = tuple(np.float32(i) for i in range(_ACCUMULATORS)), (np.float32(_ACCUMULATORS),) * _ACCUMULATORS
_fma = make_fma(2 * _ACCUMULATORS)


def _around_store(answer):
    @cuda.jit
    def around(out, pitch):
        smem = cuda.shared.array(0, uint8, 1024)
        acc = _fma(_STEPS, _ONES, float32(cuda.threadIdx.x))  # 128 * thread + accumulator
        answer(smem, out, acc, int32(cuda.blockIdx.x * 64), int32(0), pitch)

    return around


def _store(answer):
    out = torch.full((128, 256), float("nan"), dtype=torch.bfloat16)
    launch(_around_store(answer), 2, 128, out.view(torch.int32), 128, shared_bytes=16)
    thread, i = np.mgrid[:128, :_ACCUMULATORS]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
    right = torch.empty(64, 256)
    right[row, column] = torch.from_numpy(128.0 * thread + i).float()
    return out.float().numpy(), right.bfloat16().float().repeat(2, 1).numpy()


def _test_store(answer):
    expect_equal("D", *_store(answer))


def _store_code(answer):
    """Return the store instructions and the compares that the compiler makes of a store of 128 accumulators."""
    with simulator.profile("H200") as profile:
        _store(answer)
    names = [code["opcode"].split(".")[0] for code in profile.kernels[0].static.sass]
    return names.count("STG"), names.count("ISETP")


@dataclass(frozen=True)
class Unrolled(Build):
    """A `Build` that is judged by the machine code: no accumulator may be searched for."""

    def judge(self, answer):
        """Return the state, a sentence and the number of compares of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        stores, compares = _store_code(answer)
        code = f"{stores} store instructions and {compares} compares"
        if compares > self.par:
            return REFUSED, f"the result is right, but the loop remains: {code}; {_ACCUMULATORS // 2} stores do", None
        return RIGHT, f"right, and unrolled: {code}", compares


unrolled = Unrolled(
    "unrolled stores",
    "a function that stores 128 accumulators without a search",
    own=answers.store_unrolled,
    test=_test_store,
    profile=lambda answer: None,  # type: ignore[arg-type,return-value]
    counter="",
    par=8,
    most_alone=None,
    hint="Slices of a tuple with constant bounds are free: acc[:64] and acc[64:] are what two loops of 16 iterations "
    "need, and those the compiler unrolls. Or let make_for_each_chunk call a function for each four accumulators.",
    seeds=1,
    home=f"{__name__}:unrolled",
)


# Build: the order of a TMA store

_BUFFERS = 2 * BUFFER_BYTES
_wait_until_written = make_bulk_wait_group(0)


def _around_tma_store(answer):
    @cuda.jit(device=True)
    def store_64_columns(first, values, smem, out):
        lane, buffer = int32(cuda.threadIdx.x & 31), int32((first >> 5 & 1) * BUFFER_BYTES)
        answer(FREE)
        t = int32(lane & 15)
        stmatrix_rows(smem, int32(buffer + 128 * t + (((t & 7) ^ (lane >> 4)) << 4)), values)
        answer(WRITTEN)
        if elect_sync(FULL_MASK):
            tma_store_2d(out, 0, int32(2 * first), 0, smem, buffer)
            bulk_commit_group()

    store = make_for_each_chunk(_ACCUMULATORS, 32, store_64_columns)

    @cuda.jit
    def around(out):
        smem = cuda.shared.array(_BUFFERS, uint8, 1024)
        acc = _fma(_STEPS, _ONES, float32(cuda.threadIdx.x))
        store(acc, smem, out)
        if elect_sync(FULL_MASK):
            _wait_until_written()

    return around


def _tma_store(answer):
    out = torch.full((16, 256), float("nan"), dtype=torch.bfloat16)
    launch(_around_tma_store(answer), 1, 32, TensorMap(out, (16, 64), swizzle=128))
    lane, i = np.mgrid[:32, :_ACCUMULATORS]
    row, column = lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
    right = torch.empty(16, 256)
    right[row, column] = torch.from_numpy(128.0 * lane + i).float()
    return out.float().numpy(), right.bfloat16().float().numpy()


@dataclass(frozen=True)
class Order(Build):
    """Call what orders a warp's writes and TMA's reads at the right places, and wait for no more than is needed."""

    def judge(self, answer):
        """Return the state, a sentence and no score of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        with simulator.profile() as profile:
            _tma_store(answer)
        names = getattr(answer, "py_func", answer).__code__.co_names
        calls = [node.func for node in ast.walk(tree_of(answer)) if isinstance(node, ast.Call)]
        last = lambda name: max((c.lineno for c in calls if ast.unparse(c).split(".")[-1] == name), default=0)
        if 0 < last("syncwarp") < last("fence_proxy_async_shared"):
            return WRONG, _FENCE_LAST, None
        if profile.kernels[0].total.barriers > 0:
            return REFUSED, "the result is right, but all warps of the CTA wait for one another at a barrier", None
        if "wait_for_stores" in names:
            text = "right, but the warp waits until none of its stores reads any more. " + self.over_par
            return OVER_PAR, text, None
        if not any(line.syncwarps for line in profile.kernels[0].lines):
            return OVER_PAR, f"right in the simulator. {_WITHOUT_SYNCWARP}", None
        return RIGHT, "right: no access races, and a store of the warp may be under way while it writes", None


_FENCE_LAST = (
    "a lane may execute its fence after the elected lane has issued the store: a fence covers only what its own thread "
    "has written, so the lanes must meet after it. The simulator runs these lanes in step, and does not show it"
)
_WITHOUT_SYNCWARP = (
    "stmatrix and elect.sync make the lanes wait for one another. But PTX does not promise that they order memory "
    "accesses between lanes; cuda.syncwarp() does"
)
order = Order(
    "order",
    "a function that waits for the buffer at one place, and publishes the writes at the other",
    own=answers.order,
    test=lambda answer: expect_equal("D", *_tma_store(answer)),
    profile=lambda answer: None,  # type: ignore[arg-type,return-value]
    counter="",
    par=0,
    over_par="There are two buffers: which of the two stores must have been read?",
    hint="At FREE the elected lane waits for the store of two chunks ago, and tells the others. At WRITTEN each lane "
    "has written, so each lane executes the fence, and then they meet.",
    home=f"{__name__}:order",
)
