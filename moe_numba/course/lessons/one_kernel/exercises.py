"""Exercises of the lesson "One kernel"; the page checks answers with `exercises.<name>`."""

from dataclasses import dataclass

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.grader import Wrong, expect_equal, fault
from moe_numba.course.lessons.one_kernel import answers, model
from moe_numba.course.lessons.one_kernel.tables import LARGEST, MANY, rates
from moe_numba.course.lessons.one_kernel.tile import row_tiles, wait_for
from moe_numba.course.steps.exercises import Build, Choose, Predict
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import RIGHT, WRONG
from moe_numba.ptx.atomics import red_add_relaxed_gpu_s32, red_add_release_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.runtime.launch import launch

_random = np.random.default_rng(16)


# Build: the places

_RANKS, _EXPERTS, _AT = 3, 4, 5
_COUNTS = _random.integers(1, 50, _AT + _RANKS * _RANKS * _EXPERTS).astype(np.int32)
_ASKED = [(source, g) for g in range(_RANKS * _EXPERTS) for source in range(_RANKS + 1)]


def _around_places(answer):
    @cuda.jit
    def around(counts, sources, experts_of, out):
        t = int32(cuda.threadIdx.x)
        out[t] = answer(counts, int32(_AT), int32(_RANKS), int32(_EXPERTS), sources[t], experts_of[t])

    return around


def _places(kernel):
    sources, experts = (np.array(each, np.int32) for each in zip(*_ASKED, strict=True))
    out = np.full(len(_ASKED), -7, np.int32)
    kernel[1, len(_ASKED)](_COUNTS, sources, experts, out)
    return out


def _right_places():
    counts = _COUNTS[_AT:].reshape(_RANKS, _RANKS * _EXPERTS)
    first = [g // _EXPERTS * _EXPERTS for _, g in _ASKED]
    earlier = [counts[:, begin:g].sum() for begin, (_, g) in zip(first, _ASKED, strict=True)]
    return np.array([some + counts[:source, g].sum() for some, (source, g) in zip(earlier, _ASKED, strict=True)])


def _test_places(answer):
    expect_equal("the places, for each expert and rank", _places(_around_places(answer)), _right_places())


def _loaded(counted):
    """Return the counts that all threads load."""
    return sum(found.lanes for (space, what, _), found in counted.total.accesses.items() if (space, what) == _LOAD)


_LOAD = "global", "load"

place_of = Build(
    "the places",
    "a function that adds up the counts of earlier experts from all ranks, and of this expert from earlier ranks",
    own=answers.place_of,
    test=_test_places,
    profile=lambda answer: count(kernel := _around_places(answer), lambda _: _places(kernel), answer),
    counter="",
    score=_loaded,
    unit="loads",
    par=sum(g % _EXPERTS * _RANKS + source for source, g in _ASKED),
    par_is_bound=True,
    most_alone=None,
    forbidden={"barriers": "threads wait for each other, where each adds up its own counts"},
    over_par="Which counts do you load that do not come before?",
    hint="The first expert of the rank that has g is g // experts * experts. For each expert from that one to before g "
    "add the counts of all ranks; for g only those of ranks before source.",
    home=f"{__name__}:place_of",
)


# Build: the wait of the second GEMM

_LENGTHS, _COLUMN_TILES, _WORDS = (17, 0, 16, 40), 3, 32
_TOTAL = sum(_LENGTHS)


def _around_wait(answer):
    @cuda.jit
    def around(lengths, done, asked, data, out):
        """CTA 1 computes experts, each after CTA 0 has used the one before; every tile is counted when it is stored."""
        t = int32(cuda.threadIdx.x)
        for i in range(len(_LENGTHS)):
            e = int32(len(_LENGTHS) - 1 - i)  # the last one first: a wait for earlier experts is in vain
            if cuda.blockIdx.x == 1:
                wait_for(asked, 0, i)
                for tile in range(row_tiles(lengths[e]) * _COLUMN_TILES):
                    data[(e * 16 + tile) * _WORDS + t] = int32(100 * e + tile + 1)
                    cuda.syncwarp()
                    if t == 0:
                        fence_acq_rel_gpu()
                        red_add_relaxed_gpu_s32(done, e, int32(1))
            else:
                answer(done, lengths, int32(e), int32(len(_LENGTHS)), int32(_COLUMN_TILES))
                for tile in range(row_tiles(lengths[e]) * _COLUMN_TILES):
                    out[(e * 16 + tile) * _WORDS + t] = data[(e * 16 + tile) * _WORDS + t]
                cuda.syncwarp()
                if t == 0:
                    red_add_release_sys_s32(asked, 0, int32(1))

    return around


def _used(kernel):
    words = lambda n, fill: torch.full((n,), fill, dtype=torch.int32)
    lengths, done, asked = torch.tensor(_LENGTHS, dtype=torch.int32), words(len(_LENGTHS), 0), words(1, 0)
    data, out = (words(len(_LENGTHS) * 16 * _WORDS, -7) for _ in range(2))
    with simulator.weak_memory():
        launch(kernel, 2, 32, lengths, done, asked, data, out)
    return out.numpy()


def _test_wait(answer):
    right = np.full((len(_LENGTHS), 16, _WORDS), -7, np.int32)
    for e, rows in enumerate(_LENGTHS):
        for tile in range(-(-rows // 16) * _COLUMN_TILES):
            right[e, tile] = 100 * e + tile + 1
    found = _used(_around_wait(answer)).reshape(right.shape)
    for e in range(len(_LENGTHS)):
        expect_equal(f"what was read of expert {e}, tile by tile", found[e], right[e])


def _stores_and_atomics(counted):
    kinds = ("store", "atomic")
    return sum(found.lanes for (_, what, _), found in counted.total.accesses.items() if what in kinds)


wait_for_expert = Build(
    "the wait of the second GEMM",
    "a function that waits until an expert's tiles of the first GEMM are counted",
    own=answers.wait_for_expert,
    test=_test_wait,
    profile=lambda answer: count(kernel := _around_wait(answer), lambda _: _used(kernel), answer),
    counter="",
    score=_stores_and_atomics,
    unit="stores and atomics",
    par=0,
    par_is_bound=True,
    most_alone=None,
    forbidden={"barriers": "threads meet at a barrier, where each can poll the counter"},
    over_par="A wait only reads: what do you write?",
    hint="The counter of expert e reaches row_tiles(lengths[e]) * counts_of_a_tile. An expert without rows is done at "
    "once.",
    seeds=6,
    home=f"{__name__}:wait_for_expert",
)


# Break: an order that deadlocks

_CTAS, _TILES_1, _TILES = 3, 8, 16  # two experts, whose tiles alternate in halves


@dataclass(frozen=True)
class Deadlocks(Build):
    """Write something with which threads wait for ever; the verdict has the simulator's report."""

    def judge(self, answer):
        """Return the state and a sentence of an answer, in the simulator."""
        if (wrong := fault(self.test, answer)) is not None:
            return WRONG, wrong, None
        return RIGHT, f"right, each tile is computed once, and\n{_report(answer)}", None


def _own_tiles(cta):
    return -(-(_TILES - cta) // _CTAS)


def _around_order(answer):
    @cuda.jit
    def around(out):
        cta, t = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        if t < (_TILES - cta + _CTAS - 1) // _CTAS:
            out[cta * 8 + t] = answer(t, int32(0), int32(_TILES), cta, int32(_CTAS))

    return around


def _with_flags(answer):
    @cuda.jit
    def tiles_in_order(done):
        """The waits and counts of the page's kernel, without its GEMMs: a thread for each CTA."""
        cta = int32(cuda.blockIdx.x)
        for n in range((_TILES - cta + _CTAS - 1) // _CTAS):
            tile = answer(int32(n), int32(0), int32(_TILES), cta, int32(_CTAS))
            if tile >= _TILES_1:
                wait_for(done, (tile - _TILES_1) // 4, 4)
            else:
                fence_acq_rel_gpu()
                red_add_relaxed_gpu_s32(done, tile // 4, int32(1))

    return tiles_in_order


def _report(answer):
    """Return the simulator's report of a deadlock, or None if the kernel ends."""
    try:
        launch(_with_flags(answer), _CTAS, 1, torch.zeros(2, dtype=torch.int32))
    except simulator.Deadlock as error:
        return f"Deadlock: {error}"
    return None


def _test_order(answer):
    out = np.full(8 * _CTAS, -7, np.int32)
    _around_order(answer)[_CTAS, 8](out)
    tiles = sorted(int(tile) for cta in range(_CTAS) for tile in out[8 * cta : 8 * cta + _own_tiles(cta)])
    if tiles != list(range(_TILES)):
        missing = sorted(set(range(_TILES)) - set(tiles))
        raise Wrong(f"not every tile is computed once: of {_TILES} tiles for {_CTAS} CTAs {missing} are missing")
    if _report(answer) is None:
        raise Wrong("every tile is computed once, but the kernel ends: no CTA waits for a tile that is still its own")


deadlock = Deadlocks(
    "an order that deadlocks",
    "a function that returns the n-th tile of a CTA",
    own=answers.descending,
    test=_test_order,
    profile=lambda answer: None,
    counter="",
    par=0,
    hint="A CTA must wait for a tile that it, or a CTA that waits for it, computes later. Which tiles wait for which? "
    "end - 1 - tile is an order, too.",
    home=f"{__name__}:deadlock",
)


# Choose, predict

early = Choose(
    "a count before the stores",
    {
        "A": "the results are right: the stores arrive before another warp notices the count",
        "B": "the results are right: a release orders all stores of the warp",
        "C": "a tile may read rows that are not there",
    },
    "C",
    "A release orders what comes before it, and nothing that comes after it. How long another warp takes is no order. "
    "A row whose origin is not there yet may even be counted for a wrong rank; then the right one waits for ever.",
)

orders = Choose(
    "orders",
    {
        "A": "each CTA computes consecutive tiles",
        "B": "both GEMMs of expert 0, then both of expert 1, and so on",
        "C": "the tiles of the second GEMM first",
    },
    "C",
    "With A and B a CTA's tiles ascend, and a tile waits only for lower ones, so the lowest unfinished tile can always "
    "be done; they may be slow, because CTAs wait. With C every CTA waits for tiles that come later in its own list.",
)


def _way_home():
    sent = model.bytes_of(LARGEST, MANY)
    return {"microseconds": round(sent.combine_per_expert / rates().wire, 1)}


def _about_way_home():
    second = model.gemms_us(rates(), MANY)[1]
    longer = "longer" if second > _way_home()["microseconds"] else "shorter"
    return (
        f"{MANY} tokens x {model.TOPK} rows x {LARGEST - 1}/{LARGEST} x {model.BF16_ROW} bytes, over the push rate. "
        f"The second GEMM takes {second:.0f} us, so it is {longer}, and the link "
        f"{'hides behind it' if longer == 'longer' else 'sets the end of the kernel'}."
    )


way_home = Predict(
    "the way home", _way_home, _about_way_home, within={"microseconds": 0.1 * _way_home()["microseconds"]}
)
