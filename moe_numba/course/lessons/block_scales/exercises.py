"""Exercises of the lesson "Block scales"; the page checks answers with `exercises.<name>`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.course.grader import expect_equal
from moe_numba.course.lessons.block_scales import answers
from moe_numba.course.lessons.block_scales.runs import REGISTERS, SPILLED, Ring, Scales, lesson
from moe_numba.course.lessons.block_scales.sizes import MMA_WARPS, ROWS, W_SCALES
from moe_numba.course.lessons.hopper.runs import advance
from moe_numba.course.steps.exercises import Build, Choose
from moe_numba.course.steps.score import COMPILER, count
from moe_numba.course.steps.verdict import OPEN, REFUSED, RIGHT, WRONG, Verdict
from moe_numba.ptx.accumulators import make_fma, make_for_each_chunk
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity
from moe_numba.runtime.launch import launch

_random = np.random.default_rng(8)


# Build: the factors of a thread

_AT = 40  # where the scales begin: not at 0, so that an answer must add it


def _around_read(answer):
    @cuda.jit
    def around(scales, out):
        floats = cuda.shared.array(256, float32)
        zero = int32(0)
        ring = Ring(floats, floats, floats, floats, zero, zero, int32(1), zero, zero)
        thread = int32(cuda.threadIdx.x)
        floats[thread] = scales[thread]
        cuda.syncthreads()
        a, b, c, d = answer(ring, int32(_AT))
        out[thread, 0], out[thread, 1], out[thread, 2], out[thread, 3] = a, b, c, d

    return around


@cache
def _scales_of_a_stage():
    return _random.uniform(1, 2, 256).astype(np.float32)


def _read(kernel):
    scales, out = _scales_of_a_stage(), np.full((32 * MMA_WARPS, 4), np.nan, np.float32)
    kernel[1, 32 * MMA_WARPS](scales, out)
    thread = np.arange(32 * MMA_WARPS)
    row = 16 * (thread // 32) + thread % 32 // 4
    x, w = scales[_AT:], scales[_AT + W_SCALES :]
    right = np.stack([x[row] * w[0], x[row + 8] * w[0], x[row] * w[1], x[row + 8] * w[1]], 1)
    return out, right


def _test_read(answer):
    out, right = _read(_around_read(answer))
    for i, name in enumerate(("(row, block 0)", "(row + 8, block 0)", "(row, block 1)", "(row + 8, block 1)")):
        expect_equal(f"factor {name} of each thread", out[:, i], right[:, i])


read = Build(
    "factors of a thread",
    "a function that reads a thread's scales and returns its four factors",
    own=answers.read_by_row,
    test=_test_read,
    profile=lambda answer: count(kernel := _around_read(answer), lambda _: _read(kernel), answer),
    counter="shared_load_requests",
    unit="shared loads",
    par=4,
    par_is_bound=True,
    forbidden={
        "barriers": "threads wait for each other, where each needs only its own scales",
        "shared_store_requests": "it writes shared memory, where scales of a stage are only read",
    },
    over_par="Which of these loads return the same number?",
    hint="Threads 0 to 255 are those of the consumers. A warp has 16 rows, and four lanes share a row: what are warp "
    "and row in terms of thread >> 5 and (thread >> 2) & 7?",
    home=f"{__name__}:read",
)


# Build: the promotion of three blocks

_COUNT = 96
_ACC, _PART = (tuple(np.float32(v) for v in _random.integers(-64, 64, _COUNT)) for _ in range(2))
_NUMBERS, _ONES = tuple(np.float32(i) for i in range(_COUNT)), (np.float32(_COUNT),) * _COUNT
_vary = make_fma(2 * _COUNT)


@cuda.jit(device=True)
def _store_four(first, values, out, offset):
    out[offset + first], out[offset + first + 1] = values[0], values[1]
    out[offset + first + 2], out[offset + first + 3] = values[2], values[3]


_store_all = make_for_each_chunk(_COUNT, 4, _store_four)


def _around_promote(answer):
    @cuda.jit
    def around(factors, out):
        thread = int32(cuda.threadIdx.x)
        acc = _vary(_ACC, _NUMBERS, float32(thread))
        part = _vary(_PART, _ONES, float32(thread + 1))
        at = int32(6 * thread)
        six = factors[at], factors[at + 1], factors[at + 2], factors[at + 3], factors[at + 4], factors[at + 5]
        _store_all(answer(acc, part, six), out, int32(thread * _COUNT))

    return around


def _promote(answer):
    factors = np.random.default_rng(4).integers(1, 1 << 10, (32, 6)).astype(np.float32)
    out = np.full(32 * _COUNT, np.nan, np.float32)
    _launch(_around_promote(answer), factors.ravel(), out)
    thread, i = np.mgrid[:32, :_COUNT]
    acc = np.array(_ACC)[i] + i * thread
    part = np.array(_PART)[i] + _COUNT * (thread + 1)
    block, row = i // 32, i // 2 % 2
    return out.reshape(32, _COUNT), (acc + part * factors[thread, 2 * block + row]).astype(np.float32)


def _launch(kernel, factors, out):
    import torch

    launch(kernel, 1, 32, torch.from_numpy(factors), torch.from_numpy(out))


def _test_promote(answer):
    out, right = _promote(answer)
    for block in range(3):
        at = slice(32 * block, 32 * block + 32)
        expect_equal(f"the 32 accumulators of columns {64 * block} to {64 * block + 63}", out[:, at], right[:, at])


def _promote_code(answer):
    with simulator.profile("H200") as profile:
        _promote(answer)
    static = profile.kernels[0].static
    names = [code["opcode"].split(".")[0] for code in static.sass]
    return names.count("ISETP"), names.count("LDL") + names.count("STL") + static.spilled_bytes


@dataclass(frozen=True)
class Unrolled(Build):
    """A `Build` that is judged by the machine code: no accumulator may be searched for or lie in local memory."""

    def judge(self, answer):
        """Return the state, a sentence and the number of compares of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        compares, local = _promote_code(answer)
        if compares > self.par or local:
            text = f"the result is right, but the compiler searches for accumulators: {compares} compares"
            return REFUSED, f"{text}, {local} accesses to local memory; none is needed", None
        return RIGHT, f"right, with {compares} compares and nothing in local memory", compares


promote = Unrolled(
    "promotion",
    "a function that promotes 96 accumulators by six factors",
    own=answers.promote_192,
    test=_test_promote,
    profile=lambda answer: None,  # type: ignore[arg-type,return-value]
    counter="",
    par=8,
    most_alone=None,
    hint="Block i has the accumulators 32 i to 32 i + 31, and the factors 2 i and 2 i + 1: three calls of fma_64, and "
    "their results joined by +.",
    seeds=1,
    home=f"{__name__}:promote",
)


# Build: the warps that write factors

_STAGES, _BLOCKS, _STAGE_FLOATS, _FLOATS_AT = 2, 5, 640, 64
_FULL, _EMPTY, _BARRIERS = 0, _STAGES, 2 * _STAGES  # in an array of their own
_X_ROWS, _ROW, _COLUMN, _W_BLOCKS = 2 * ROWS, 128, 192, 4


def _around_write(answer):
    @cuda.jit
    def around(x_scale, w_scale, out):
        floats, words = cuda.shared.array(0, float32, 1024), cuda.shared.array(0, int32, 1024)
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(_BARRIERS, uint64)
        ring = Ring(
            *(smem, floats, words, barriers, int32(_FULL), int32(_EMPTY), int32(_STAGES)),
            *(int32(_STAGE_FLOATS), int32(_FLOATS_AT)),
        )
        scales = Scales(x_scale, w_scale, int32(_X_ROWS), int32(_BLOCKS))
        thread = int32(cuda.threadIdx.x)
        warp, lane, stage = int32(thread >> 5), int32(thread & 31), int32(0)
        if thread == 0:
            for s in range(_STAGES):
                mbarrier_init(barriers, _FULL + s, 2)
                mbarrier_init(barriers, _EMPTY + s, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp < 2:
            phase, own = uint32(1), int32(64 * warp + lane)
            for k in range(_BLOCKS):
                answer(ring, stage, phase, scales, int32(_ROW), int32(_COLUMN), int32(k), own)
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(barriers, _FULL + stage)
                stage, phase = advance(ring, stage, phase)
        else:
            phase = uint32(0)
            for k in range(_BLOCKS):
                mbarrier_wait_parity(barriers, _FULL + stage, phase)
                at = int32(_FLOATS_AT + stage * _STAGE_FLOATS)
                for row in range(lane, 128, 32):
                    for i in range(3):
                        out[384 * k + 3 * row + i] = floats[uint32(at + 4 * row + i)]
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(barriers, _EMPTY + stage)
                stage, phase = advance(ring, stage, phase)

    return around


def _write(kernel):
    import torch

    random = np.random.default_rng(5)
    x, w = (random.uniform(1, 2, shape).astype(np.float32) for shape in ((_BLOCKS, _X_ROWS), (_W_BLOCKS, _BLOCKS)))
    out = np.full((_BLOCKS, ROWS, 3), np.nan, np.float32)
    given = (torch.from_numpy(each) for each in (x, w))
    shared = 4 * (_FLOATS_AT + _STAGES * _STAGE_FLOATS)
    launch(kernel, 1, 96, *given, torch.from_numpy(out).view(-1), shared_bytes=shared)
    blocks = [(_COLUMN + 64 * i) // 128 for i in range(3)]
    return out, x[:, _ROW : _ROW + ROWS, None] * w[blocks].T[:, None, :]


def _test_write(answer):
    out, right = _write(_around_write(answer))
    for k in range(_BLOCKS):
        for i in range(3):
            name = f"k-block {k}: the factors of the tile's rows in columns {_COLUMN + 64 * i} on"
            expect_equal(name, out[k, :, i], right[k, :, i])


write = Build(
    "writers of factors",
    "a function that writes the factors of two rows to a stage",
    own=answers.write_factors,
    test=_test_write,
    profile=lambda answer: count(kernel := _around_write(answer), lambda _: _write(kernel), answer),
    counter="shared_store_requests",
    unit="shared stores",
    score=lambda counted: counted.total.shared_store_requests // (2 * _BLOCKS),
    par=2,
    par_is_bound=True,
    forbidden={"barriers": "both warps and all others wait for each other"},
    over_par="The four floats of a row are 16 bytes: which instruction stores them at once?",
    hint="Load first, then wait for empty with the phase that you are given, then store. The wait is "
    "mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase).",
    home=f"{__name__}:write",
)


# Predict: the widest tile


class Widest:
    """Predict which tile has the most columns whose accumulators and partial sums fit into registers."""

    def check(self, versions: Mapping[int, Any], choice=...) -> Verdict:
        """Compare a number of columns with what the compiler makes of each version."""
        if choice is ...:
            return Verdict("widest tile", OPEN, f"no prediction yet ({', '.join(map(str, versions))} columns)")
        if choice not in versions:
            text = f"you predicted {choice!r}; the tiles have {', '.join(map(str, versions))} columns"
            return Verdict("widest tile", WRONG, text)
        rows = {columns: lesson._score(f"{columns} columns", version).rows for columns, version in versions.items()}
        spilled = {columns: int(of[COMPILER, SPILLED]) for columns, of in rows.items()}
        widest = max(columns for columns, amount in spilled.items() if not amount)
        facts = ", ".join(f"{columns} columns: {amount:,} bytes spilled" for columns, amount in spilled.items())
        state = RIGHT if choice == widest else WRONG
        return Verdict("widest tile", state, f"you predicted {choice}. {facts}. {_WIDEST}")


_WIDEST = (
    "A tile of n columns needs n registers for accumulators and partial sums, and some 20 for addresses and factors. "
    f"(The row '{REGISTERS}' says 168 for all of them: that is the number at the start, before setmaxnreg.)"
)
widest = Widest()


# Diagnose: ratios


@cuda.jit(device=True)
def colleagues_write(ring, stage, phase, scales, row, column, k, own):
    first = int32(k * scales.rows + row + own)
    a, b = scales.x[first], scales.x[first + 32]
    w = scales.w[((column >> 7) + (own >> 1)) * scales.k_blocks + k] if own < 3 else float32(0)
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    at = int32(ring.scales + stage * ring.stage_floats)
    ring.floats[uint32(at + own)] = a
    ring.floats[uint32(at + own + 32)] = b
    if own < 3:
        ring.floats[uint32(at + W_SCALES + own)] = w


_RATIOS = (
    "All rows are right, so the scales of x are. Of w, one block of 64 columns is wrong in every second tile: tile 1 "
    "begins at column 192, in the middle of block 1 of w, so its three blocks have the scales 1, 2 and 2. The "
    "colleague wrote (column >> 7) + (i >> 1) for block i, which gives 1, 1 and 2; right is "
    "(column + 64 * i) >> 7. A race would be wrong in some runs and places only, and the scales of "
    "another k-block would be wrong in every element."
)
ratios = Choose(
    "colleague's kernel",
    {
        "A": "the two rows of a thread exchange their scales",
        "B": "the scales are those of the k-block before",
        "C": "a block of 64 columns has the scale of w of its left neighbour, where a tile begins inside a block of w",
        "D": "the warps write to a stage that is still being read",
    },
    "C",
    _RATIOS,
)
