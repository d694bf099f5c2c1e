"""The lesson "Block scales": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path

import pytest
from lesson_pages import definitions, fault_of, run_with_sizes
from lesson_peers import record_peers, use_stand_ins

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.block_scales import answers, draw, exercises, runs
from moe_numba.course.lessons.block_scales.answers import fma_64
from moe_numba.course.lessons.block_scales.runs import Version
from moe_numba.course.lessons.block_scales.sizes import W_SCALES
from moe_numba.course.steps.score import COMPILER
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.arithmetic import float_as_int
from moe_numba.ptx.mbarrier import mbarrier_wait_parity
from moe_numba.ptx.memory import st_shared_s32x4

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]


# Answers: the factors of a thread


@cuda.jit(device=True)
def stub(ring, at):
    pass


@cuda.jit(device=True)
def rows_next_to_each_other(ring, at):
    row = int32(16 * (int32(cuda.threadIdx.x) >> 5) + 2 * (int32(cuda.threadIdx.x) >> 2 & 7))
    a, b = ring.floats[uint32(at + row)], ring.floats[uint32(at + row + 1)]
    v, w = ring.floats[uint32(at + W_SCALES)], ring.floats[uint32(at + W_SCALES + 1)]
    return a * v, b * v, a * w, b * w


@cuda.jit(device=True)
def order_of_rows(ring, at):
    row = int32(16 * (int32(cuda.threadIdx.x) >> 5) + (int32(cuda.threadIdx.x) >> 2 & 7))
    a, b = ring.floats[uint32(at + row)], ring.floats[uint32(at + row + 8)]
    v, w = ring.floats[uint32(at + W_SCALES)], ring.floats[uint32(at + W_SCALES + 1)]
    return a * v, a * w, b * v, b * w


@cuda.jit(device=True)
def loads_for_each_factor(ring, at):
    row = int32(16 * (int32(cuda.threadIdx.x) >> 5) + (int32(cuda.threadIdx.x) >> 2 & 7))
    first, second, v, w = int32(at + row), int32(at + row + 8), int32(at + W_SCALES), int32(at + W_SCALES + 1)
    return (
        ring.floats[first] * ring.floats[v],
        ring.floats[second] * ring.floats[v],
        ring.floats[first] * ring.floats[w],
        ring.floats[second] * ring.floats[w],
    )


@cuda.jit(device=True)
def meets_first(ring, at):
    cuda.syncthreads()
    return answers.read_by_row(ring, at)


@cuda.jit(device=True)
def forgets_where_scales_begin(ring, at):
    return answers.read_by_row(ring, int32(0))


# The promotion


@cuda.jit(device=True)
def one_block_twice(acc, part, factors):
    first = fma_64(acc[:32], part[:32], factors[:2])
    return first + fma_64(acc[32:64], part[32:64], factors[:2]) + fma_64(acc[64:], part[64:], factors[4:])


@cuda.jit(device=True)
def does_not_add(acc, part, factors):
    first = fma_64(part[:32], part[:32], factors[:2])
    return first + fma_64(acc[32:64], part[32:64], factors[2:4]) + fma_64(acc[64:], part[64:], factors[4:])


@cuda.jit(device=True)
def searches(acc, part, factors):
    total = cuda.local.array(96, float32)
    for i in range(96):
        total[i] = acc[i] + part[i] * factors[2 * (i >> 5) + (i >> 1 & 1)]
    first = fma_64(acc[:32], part[:32], factors[:2])
    rest = fma_64(acc[32:64], part[32:64], factors[2:4]) + fma_64(acc[64:], part[64:], factors[4:])
    return first + rest if total[95] < float32(1e30) else acc


# The writers of factors


@cuda.jit(device=True)
def does_not_wait(ring, stage, phase, scales, row, column, k, own):
    x_index = int32(k * scales.rows + row + own)
    a, b = scales.x[x_index], scales.x[x_index + 32]
    u = scales.w[(column >> 7) * scales.k_blocks + k]
    v = scales.w[((column + 64) >> 7) * scales.k_blocks + k]
    w = scales.w[((column + 128) >> 7) * scales.k_blocks + k]
    at, none = int32(ring.scales + stage * ring.stage_floats + 4 * own), float_as_int(float32(0))
    st_shared_s32x4(ring.words, at, float_as_int(a * u), float_as_int(a * v), float_as_int(a * w), none)
    st_shared_s32x4(ring.words, int32(at + 128), float_as_int(b * u), float_as_int(b * v), float_as_int(b * w), none)


@cuda.jit(device=True)
def blocks_of_two(ring, stage, phase, scales, row, column, k, own):
    x_index = int32(k * scales.rows + row + own)
    a, b = scales.x[x_index], scales.x[x_index + 32]
    u = scales.w[(column >> 7) * scales.k_blocks + k]
    w = scales.w[((column >> 7) + 1) * scales.k_blocks + k]
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    at, none = int32(ring.scales + stage * ring.stage_floats + 4 * own), float_as_int(float32(0))
    st_shared_s32x4(ring.words, at, float_as_int(a * u), float_as_int(a * u), float_as_int(a * w), none)
    st_shared_s32x4(ring.words, int32(at + 128), float_as_int(b * u), float_as_int(b * u), float_as_int(b * w), none)


@cuda.jit(device=True)
def stores_one_by_one(ring, stage, phase, scales, row, column, k, own):
    x_index = int32(k * scales.rows + row + own)
    a, b = scales.x[x_index], scales.x[x_index + 32]
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    at = int32(ring.scales + stage * ring.stage_floats + 4 * own)
    for i in range(3):
        w = scales.w[((column + 64 * i) >> 7) * scales.k_blocks + k]
        ring.floats[uint32(at + i)] = a * w
        ring.floats[uint32(at + i + 128)] = b * w


@cuda.jit(device=True)
def one_lane(ring, stage, phase, scales, row, column, k, own):
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    if own & 31 == 0:
        for r in range(own, own + 64):
            a = scales.x[int32(k * scales.rows + row + r)]
            u = scales.w[(column >> 7) * scales.k_blocks + k]
            v = scales.w[((column + 64) >> 7) * scales.k_blocks + k]
            w = scales.w[((column + 128) >> 7) * scales.k_blocks + k]
            at, none = int32(ring.scales + stage * ring.stage_floats + 4 * r), float_as_int(float32(0))
            st_shared_s32x4(ring.words, at, float_as_int(a * u), float_as_int(a * v), float_as_int(a * w), none)


READ, PROMOTE, WRITE = exercises.read, exercises.promote, exercises.write


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (READ, ..., OPEN, "not answered yet"),
        (READ, stub, OPEN, "not answered yet"),
        (READ, answers.read_by_row, RIGHT, "4 shared loads"),
        (READ, rows_next_to_each_other, WRONG, r"factor \(row, block 0\)"),
        (READ, order_of_rows, WRONG, r"factor \(row \+ 8, block 0\)"),
        (READ, forgets_where_scales_begin, WRONG, r"factor \(row, block 0\)"),
        (READ, loads_for_each_factor, OVER_PAR, "Which of these loads"),
        (READ, meets_first, REFUSED, "threads wait for each other"),
        (PROMOTE, answers.promote_192, RIGHT, "nothing in local memory"),
        (PROMOTE, one_block_twice, WRONG, "columns 64 to 127"),
        (PROMOTE, does_not_add, WRONG, "columns 0 to 63"),
        (PROMOTE, searches, REFUSED, "searches for accumulators"),
        (WRITE, answers.write_factors, RIGHT, "2 shared stores"),
        (WRITE, does_not_wait, WRONG, "race|k-block"),
        (WRITE, blocks_of_two, WRONG, "k-block 0: the factors of the tile's rows in columns 256 on"),
        (WRITE, stores_one_by_one, OVER_PAR, "16 bytes"),
        (WRITE, one_lane, REFUSED, "one lane executes a line"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_the_ratios_are_explained_after_a_choice():
    check = exercises.ratios.check
    assert check().state == OPEN and "begins at column" not in check().text
    assert check("A").state == check("E").state == WRONG and check("C").state == RIGHT


# The page's kernels, and changes that the check must find


NOTEBOOK = ROOT / "notebooks/08_block_scales.py"


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = dict(read_by_row=answers.read_by_row, promote_192=answers.promote_192, write_factors=answers.write_factors)
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


fault = partial(fault_of, runs)
STEPS = (
    "no scales",
    "scale per column",
    "scale per row",
    "192 columns",
    "factors by producers",
    "barrier tested early",
)


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    with simulator.seed(2):
        assert runs.check(eval(steps[name], names)) is None


def test_the_last_step_has_no_races(right_page):
    names, steps = right_page
    with simulator.seed(5), simulator.races():
        assert runs.check(eval(steps["barrier tested early"], names)) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("no scales", "1 + SCALE_WARPS)", "SCALE_WARPS)"),
        ("no scales", "store(out, acc, int32(row + 64 * group)", "store(out, acc, int32(row + 32 * group)"),
        ("scale per column", "(own >> 3) * 2 + (own & 1)", "(own >> 3) * 2"),
        ("scale per column", "uint32(to + 8)", "uint32(to + 16)"),
        ("scale per row", "scales.rows + row + own)\n        a, b", "scales.rows + own)\n        a, b"),
        ("scale per row", "uint32(at + own + 32)", "uint32(at + own + 16)"),
        ("192 columns", "(column + 64 * own) >> 7", "(column >> 7) + (own >> 1)"),
        (
            "192 columns",
            "return a * u, b * u, a * v, b * v, a * w, b * w",
            "return a * u, b * u, a * u, b * u, a * w, b * w",
        ),
        ("factors by producers", "int32(at + 4 * row + 32)", "int32(at + 4 * row + 16)"),
        ("factors by producers", "cuda.syncwarp()\n                        if lane == 0:", "if lane == 0:"),
        ("barrier tested early", "if ready == 0:", "if ready == 2:"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    version = eval(steps[name], names)
    with simulator.races("syncwarp" in right):
        assert fault(version) is not None


def test_a_stage_that_is_released_too_early_is_a_race(right_page):
    found = runs.lesson.orders(Version(right_page[0]["late"]), seeds=1)
    assert found.race is not None and "DataRace" in found.race


def test_the_colleagues_kernel_is_wrong_in_one_block(right_page):
    names = right_page[0]
    assert fault(Version(names["colleague"], **names["WIDE"])) is not None
    ratios = runs.ratios(Version(names["colleague"], **names["WIDE"]))
    wrong = [at for at in range(0, ratios.shape[1], 64) if (ratios[:, at : at + 64] != 1).any()]
    assert wrong == [256, 640] and (ratios[:, 256:320] == 2).all()
    assert "columns 256 on" in str(runs.show_ratios(Version(names["colleague"], **names["WIDE"])))


def test_kernels_without_a_part_are_wrong(right_page):
    names = right_page[0]
    make, parts = names["make_gemm"], names["parts"]
    for kernel in (
        make(*parts, 192, 5, False, names["load_nothing"]),
        make(*parts, 192, 5, False, names["load_stage"], names["multiply_nothing"]),
        make(names["write_nothing"], *parts[1:], 192, 5),
        make(parts[0], names["read_constants"], parts[2], 192, 5),
    ):
        assert fault(Version(kernel, **names["WIDE"])) is not None


# What the compiler makes of them, tables and figures


def test_scores_say_what_changes(right_page):
    names, steps = right_page
    rows = {name: runs.lesson.count(eval(version, names), name).rows for name, version in steps.items()}
    of = lambda row: [rows[name][COMPILER, row] for name in STEPS]
    assert of(runs.SPILLED) == [0] * 6 and of(runs.LOADS) == [0, 9, 3, 3, 2, 2]
    assert of(runs.FMAS) == [64, 96, 64, 96, 96, 96] and of(runs.MULTIPLIES)[4:] == [0, 0]
    loops = of(runs.LOOP)
    assert loops[0] < loops[2] < loops[1] and loops[4] < loops[3]


def test_the_widest_tile_is_judged_by_the_compiler(right_page):
    names = right_page[0]
    versions = {n: names["without_scales"](n, stages) for n, stages in ((192, 5), (256, 4))}
    check = exercises.widest.check
    assert check(versions).state == OPEN and check(versions, 224).state == WRONG
    assert check(versions, 256).state == WRONG and check(versions, 192).state == RIGHT


def test_the_tables_have_lines(right_page):
    names = right_page[0]
    assert "192" not in str(runs.show_parts({}))
    assert "pairs" not in str(runs.show_what_did_not_pay()) and "clusters" in str(runs.show_what_did_not_pay())
    assert "8,192" in str(runs.show_grouped()) and "Zipf's law" in str(runs.show_grouped())
    assert "the package" in str(runs.show_peers(Version(names["early"], **names["WIDE"])))
    assert "no scales" in str(runs.show_power({"no scales": Version(names["unscaled"], scaled=False)}))
    assert "GFLOP" in runs.lower_bound() and "4096 x 4608" in runs.result()


def test_peers_that_are_right_are_in_the_table(right_page, tmp_path, monkeypatch, capsys):
    version = Version(right_page[0]["early"], **right_page[0]["WIDE"])
    use_stand_ins(monkeypatch, tmp_path)
    table = runs.show_peers(version)
    assert ["right", "not timed", ""] in table.lines and table.note.endswith("in the same run: right right 1.2.")
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and printed[0].startswith("peer broken is left out (")
    assert printed[1].startswith("peer:wrong is left out, peers: ")


def test_peers_of_the_record_are_in_the_table(right_page, monkeypatch):
    version = Version(right_page[0]["early"], **right_page[0]["WIDE"])
    record_peers(monkeypatch, runs.lesson, ["peers"], fast=50.0, slow=1000.0)
    table = runs.show_peers(version)
    times = {line[0]: line[1] for line in table.lines}
    assert times["this lesson"] == "200" and times["fast"] == "50.0" and times["slow"] == "1000"
    versions = "fast 6e2eced, slow 6e2eced"
    assert table.note == f"The fastest is fast. Other projects' kernels, timed in the same run: {versions}."
    assert versions in str(table) and versions in table._repr_html_()
    record_peers(monkeypatch, runs.lesson, [])
    table = runs.show_peers(version)
    assert "No other project's" in table.note and "fast" not in [line[0] for line in table.lines]


def test_figures_say_what_they_show():
    for figure in (draw.problem(), draw.roles(), draw.factors(True), draw.factors(False), draw.stage()):
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg
    assert len(draw.own_elements(5)) == 12 and (1, 2) in draw.own_elements(5)


def test_the_page_runs_with_other_sizes():
    printed = run_with_sizes(
        NOTEBOOK, "block_scales", M=2048, N=768, K=1024, SMALL_M=128, SMALL_N=384, SMALL_K=640, SMALL_SMS=3
    )
    assert "D is 2048 x 768, and K is 1024" in printed and "barrier tested early" in printed
