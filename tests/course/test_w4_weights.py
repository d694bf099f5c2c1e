"""The lesson "4-bit weights": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, fault_of, run_with_sizes
from lesson_peers import record_peers, use_stand_ins

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.bench import Stats
from moe_numba.course.lessons.w4_weights import answers, draw, exercises, runs
from moe_numba.course.lessons.w4_weights.runs import First, Version, load_rows, mma
from moe_numba.course.steps.score import COMPILER
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.grouped_gemm import pack_mxfp4

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]


# Answers: decode a word


@cuda.jit(device=True)
def stub(word):
    pass


@cuda.jit(device=True)
def forgets_the_sign(word):
    rest = uint32(0x01C001C0)
    return (
        uint32((word << uint32(6)) & rest),
        uint32((word << uint32(2)) & rest),
        uint32((word >> uint32(2)) & rest),
        uint32((word >> uint32(6)) & rest),
    )


@cuda.jit(device=True)
def other_order(word):
    a, b, c, d = answers.decode_word(word)
    return a, c, b, d


@cuda.jit(device=True)
def bits_of(code):
    return uint32((code & uint32(8)) << uint32(12) | (code & uint32(7)) << uint32(6))


@cuda.jit(device=True)
def one_by_one(word):
    a = uint32(bits_of(word) | bits_of(uint32(word >> uint32(16))) << uint32(16))
    b = uint32(bits_of(uint32(word >> uint32(4))) | bits_of(uint32(word >> uint32(20))) << uint32(16))
    c = uint32(bits_of(uint32(word >> uint32(8))) | bits_of(uint32(word >> uint32(24))) << uint32(16))
    d = uint32(bits_of(uint32(word >> uint32(12))) | bits_of(uint32(word >> uint32(28))) << uint32(16))
    return a, b, c, d


@cuda.jit(device=True)
def looks_up(word):
    table = cuda.shared.array(16, uint32)
    lane = int32(cuda.threadIdx.x)
    if lane < 16:
        table[lane] = bits_of(uint32(lane))
    cuda.syncwarp()
    a = uint32(table[word & uint32(15)] | table[word >> uint32(16) & uint32(15)] << uint32(16))
    b = uint32(table[word >> uint32(4) & uint32(15)] | table[word >> uint32(20) & uint32(15)] << uint32(16))
    c = uint32(table[word >> uint32(8) & uint32(15)] | table[word >> uint32(24) & uint32(15)] << uint32(16))
    d = uint32(table[word >> uint32(12) & uint32(15)] | table[word >> uint32(28)] << uint32(16))
    return a, b, c, d


# The multiplication of a warp


@cuda.jit(device=True)
def by_multiplication(word):  # a product shifts, too
    a = uint32((word & uint32(0x000F000F)) * uint32(4160)) & uint32(0x81C081C0)
    b = uint32((uint32(word >> uint32(4)) & uint32(0x000F000F)) * uint32(4160)) & uint32(0x81C081C0)
    c = uint32((uint32(word >> uint32(8)) & uint32(0x000F000F)) * uint32(4160)) & uint32(0x81C081C0)
    d = uint32((uint32(word >> uint32(12)) & uint32(0x000F000F)) * uint32(4160)) & uint32(0x81C081C0)
    return a, b, c, d


@cuda.jit(device=True)
def without_swizzle(acc, a, smem, at):
    lane = int32(cuda.threadIdx.x & 31)
    first = int32(at + 128 * (lane & 7) + ((lane >> 3) << 4))
    b, c = load_rows(smem, first), load_rows(smem, int32(first + 64))
    acc = mma(acc, a[0:4], b[0:2])
    acc = mma(acc, a[4:8], b[2:4])
    acc = mma(acc, a[8:12], c[0:2])
    return mma(acc, a[12:16], c[2:4])


@cuda.jit(device=True)
def forgets_accumulators(acc, a, smem, at):
    zero = float32(0)
    return answers.multiply_by_warp((zero, zero, zero, zero), a, smem, at)


@cuda.jit(device=True)
def loads_for_each_mma(acc, a, smem, at):
    lane = int32(cuda.threadIdx.x & 31)
    row = int32(lane & 7)
    first = int32(at + 128 * row + ((lane >> 3 ^ row) << 4))
    acc = mma(acc, a[0:4], load_rows(smem, first)[0:2])
    acc = mma(acc, a[4:8], load_rows(smem, first)[2:4])
    acc = mma(acc, a[8:12], load_rows(smem, int32(first ^ 64))[0:2])
    return mma(acc, a[12:16], load_rows(smem, int32(first ^ 64))[2:4])


DECODE, MULTIPLY = exercises.decode, exercises.multiply


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (DECODE, ..., OPEN, "not answered yet"),
        (DECODE, stub, OPEN, "not answered yet"),
        (DECODE, by_multiplication, RIGHT, r"16 instructions .*5 IMAD"),
        (DECODE, answers.decode_word, RIGHT, "16 instructions .* par is 16"),
        (DECODE, forgets_the_sign, WRONG, "register 0 is 0x00000000, not 0x00008000"),
        (DECODE, other_order, WRONG, "register 1 is"),
        (DECODE, one_by_one, OVER_PAR, "both codes of a register at once"),
        (DECODE, looks_up, REFUSED, "looked up in memory"),
        (MULTIPLY, answers.multiply_by_warp, RIGHT, "2 loads from shared memory"),
        (MULTIPLY, without_swizzle, WRONG, "accumulator 0"),
        (MULTIPLY, forgets_accumulators, WRONG, "accumulator 0"),
        (MULTIPLY, loads_for_each_mma, OVER_PAR, "One ldmatrix loads four chunks"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (..., OPEN, "not answered yet"),
        (lambda row, column: ..., OPEN, "not answered yet"),
        (answers.place_of, RIGHT, "4096"),
        (lambda row, column: (2 * row + column // 32, column // 8 % 4, 4 * (column % 8)), WRONG, "row 0, column 1"),
        (
            lambda r, c: (*answers.place_of(r, c)[:2], answers.place_of(r, c)[2] ^ 4),
            WRONG,
            "the code of row 8, column 0",
        ),
    ],
)
def test_places(answer, state, text):
    verdict = exercises.place.check(answer)
    assert verdict.state == state and re.search(text, verdict.text), verdict.text


def test_traffic_is_judged():
    check = exercises.traffic.check
    assert check().state == check(gemm_reads=...).state == OPEN
    assert check(decoder_reads=4.25, decoder_writes=16, gemm_reads=16).state == RIGHT
    assert check(decoder_reads=4).state == check(others=1).state == WRONG


def test_wrong_columns_are_explained_after_a_choice():
    check = exercises.columns.check
    assert check().state == OPEN and "neighbours" not in check().text
    assert check("A").state == check("E").state == WRONG and check("B").state == RIGHT


# The page's kernels, and changes that the check must find


NOTEBOOK = ROOT / "notebooks/09_w4_weights.py"


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = dict(decode_word=answers.decode_word, multiply_by_warp=answers.multiply_by_warp)
    return definitions(NOTEBOOK, own, r"exercises\.", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


fault = partial(fault_of, runs)
STEPS = "dequantise first", "decode in the consumer", "shift, mask, multiply", "four warpgroups", "mma.sync"


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    with simulator.seed(2):
        assert runs.check(eval(steps[name], names)) is None


def test_the_ring_wraps(right_page):
    """The page's sizes have fewer stages than its rings."""
    problem, names = runs.inputs(2, 256, 512), right_page[0]
    for multiply in (names["multiply"], answers.multiply_by_warp):
        version = Version(names["make_gemm"](names["decode_by_masks"], multiply, 4, 3), 4, 3)
        with simulator.seed(1):
            assert runs.wrong(runs.gemm(version, problem, runs._out(problem)), problem.right) is None


def test_the_last_step_has_no_races(right_page):
    names, steps = right_page
    with simulator.seed(5), simulator.races():
        assert runs.check(eval(steps["mma.sync"], names)) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("dequantise first", "int32(scales[i >> 2]) << 23", "int32(scales[i >> 3]) << 23"),
        ("dequantise first", "mantissa if exponent == 0", "2 if exponent == 0"),
        ("decode in the consumer", "int32(TOKENS * expert)\n", "int32(0)\n"),
        ("decode in the consumer", "(row_of_tiles * k_stages + k)", "row_of_tiles * k_stages"),
        (
            "decode in the consumer",
            "decode_two(word >> uint32(4), word >> uint32(20), scale_1)",
            "decode_two(word, word, scale_1)",
        ),
        (
            "decode in the consumer",
            "row = int32((in_expert * warpgroups + group)",
            "row = int32((in_expert * warpgroups)",
        ),
        ("shift, mask, multiply", "scaled(uint32(b), p, q)", "scaled(uint32(b), r, s)"),
        ("shift, mask, multiply", "uint32(0x00800080))  #", "uint32(0x00800000))  #"),
        ("four warpgroups", "group * weight_bytes + t * TILE_BYTES", "t * TILE_BYTES"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    assert fault(eval(steps[name], names)) is not None


def test_kernels_that_leave_decoding_out_are_wrong(right_page):
    names = right_page[0]
    assert fault(Version(names["make_gemm"](names["decode_nothing"], names["multiply"], 2, 12), 2, 12)) is not None


def test_columns_of_the_colleagues_weights_are_exchanged(right_page):
    version = right_page[0]["by_masks"]
    assert runs.columns_found(version) == list(range(16))
    assert runs.columns_found(version, exercises.colleagues_pack) == [c ^ 8 for c in range(16)]
    assert "column that comes" in str(runs.show_columns(version, exercises.colleagues_pack))


def test_packed_weights_have_the_size_of_the_packages():
    problem = runs.inputs(2, 256, 256)
    assert problem.packed.shape == pack_mxfp4(problem.blocks, problem.scales).shape
    assert runs.CODES * 8 / runs.WEIGHTS == 4.25


# What the compiler makes of them, tables and figures


def test_scores_say_what_changes(right_page):
    names, steps = right_page
    rows = {name: runs.lesson.count(eval(version, names), name).rows for name, version in steps.items()}
    of = lambda row: [rows[name][COMPILER, row] for name in STEPS]
    assert of(runs.SPILLED) == [0] * 5 and of(runs.CONVERSIONS)[2:] == [0] * 3
    loops = of(runs.LOOP)
    assert loops[2] < loops[1] / 3 and loops[4] < loops[3] < 150 and 400 < loops[0] < 700


def test_the_tables_have_lines(right_page):
    names, steps = right_page
    last = eval(steps["mma.sync"], names)
    assert "by masks" in str(runs.show_limits({"by masks": names["by_masks"]}))
    assert "not decoded" not in str(runs.show_parts({})) and "registers" in str(runs.show_what_did_not_pay())
    assert "MXFP4" in str(runs.show_rows()) and "2,048" in str(runs.show_rows())
    assert "torch.bmm" in str(runs.show_peers(last))
    assert "499 MB" in runs.lower_bound() and "rate of a copy" in runs.result()
    assert runs.two_passes() > 5 * runs.copy_us(runs.CODES)


def test_wrong_elements_are_named():
    right = runs.inputs(2, 256, 256).right
    out = right.bfloat16()
    assert runs.wrong(out, right) is None
    out[1, 2, 3] += 40
    assert "y[1, 2, 3] is" in runs.wrong(out, right)
    out[0, 0, 7] = float("nan")
    assert "1 were never written" in runs.wrong(out, right)


def test_peers_that_are_right_are_in_the_table(right_page, tmp_path, monkeypatch, capsys):
    version = eval(right_page[1]["mma.sync"], right_page[0])
    use_stand_ins(monkeypatch, tmp_path)
    table = runs.show_peers(version)
    assert ["right", "not timed", ""] in table.lines and table.note.endswith("in the same run: right right 1.2.")
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and printed[0].startswith("peer broken is left out (")
    assert printed[1].startswith("peer:wrong is left out, peers: ")


def test_peers_are_timed_interleaved_and_recorded_with_their_versions(right_page, tmp_path, monkeypatch):
    use_stand_ins(monkeypatch, tmp_path)
    monkeypatch.setattr(type(runs.lesson), "is_timed", True)
    monkeypatch.setattr(runs.lesson, "diagnosed", {})
    timed = []

    def measured(calls):
        timed.append(list(calls))
        return {label: Stats(float(n), n, n) for n, label in enumerate(calls, 3)}

    monkeypatch.setattr(runs.lesson, "measured", measured)
    table = runs.show_peers(eval(right_page[1]["mma.sync"], right_page[0]))
    assert timed == [["this lesson", "the package's kernel", "torch.bmm, bfloat16 weights", "right"]]
    assert [line[1] for line in table.lines] == ["3.00", "4.00", "5.00", "6.00"]
    assert {step: row.get("version") for step, row in runs.lesson.diagnosed.items()} == {
        "peers: this lesson": None,
        "peers: the package's kernel": None,
        "peers: torch.bmm, bfloat16 weights": None,
        "peers: right": "right 1.2",
    }


def test_peers_of_the_record_are_in_the_table(right_page, monkeypatch):
    version = eval(right_page[1]["mma.sync"], right_page[0])
    record_peers(monkeypatch, runs.lesson, ["peers"], fast=50.0, slow=1000.0)
    table = runs.show_peers(version)
    times = {line[0]: line[1] for line in table.lines}
    assert times["this lesson"] == "200" and times["fast"] == "50.0" and times["slow"] == "1000"
    versions = "fast 6e2eced, slow 6e2eced"
    assert table.note == f"The fastest is fast. Other projects' kernels, timed in the same run: {versions}."
    record_peers(monkeypatch, runs.lesson, [])
    table = runs.show_peers(version)
    assert "No other project's" in table.note and "fast" not in [line[0] for line in table.lines]


def test_figures_say_what_they_show():
    for figure in (draw.codes(), draw.path(), draw.word(), draw.decoding(13), draw.ldmatrix()):
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg
    assert "The code is -3" in draw.decoding(13)._repr_svg_()


def test_first_versions_are_found_by_their_type():
    assert len(First(None)) == 1 and isinstance(runs.inputs(2, 256, 256).x, torch.Tensor)


def test_the_page_runs_with_other_sizes():
    printed = run_with_sizes(
        NOTEBOOK, "w4_weights", EXPERTS=8, N=2048, K=2048, SMALL_EXPERTS=1, SMALL_N=256, SMALL_K=128, SMALL_SMS=2
    )
    assert "8 weights of 2048 x 2048" in printed and "mma.sync" in printed
