"""The lesson "Grouped GEMM": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path

import pytest
from lesson_pages import definitions, fault_of, run_with_sizes
from lesson_peers import record_peers, use_stand_ins

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, int64, uint32

from moe_numba.course.lessons.grouped_gemm import answers, draw, exercises, runs
from moe_numba.course.lessons.grouped_gemm.runs import Version
from moe_numba.course.lessons.grouped_gemm.sizes import BAND, MAPS_BYTES
from moe_numba.course.steps.score import COMPILER
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.grouped_gemm.common.scheduler import divide, num_tiles
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_gpu
from moe_numba.ptx.warp import FULL_MASK, warp_inclusive_scan

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]


# Answers: the group of a tile


@cuda.jit(device=True)
def walks_through_the_table(table, m):
    g = int32(0)
    while table.words[uint32(table.at + g + 1)] <= m:
        g = int32(g + 1)
    return g


@cuda.jit(device=True)
def stops_at_an_empty_group(table, m):
    g = int32(0)
    while table.words[uint32(table.at + g)] < m:
        g = int32(g + 1)
    return g


# Counts


@cuda.jit(device=True)
def one_lane_counts(lengths, groups, tokens, first, at):
    if cuda.threadIdx.x & 31 == 0:
        before = int32(0)
        for g in range(groups):
            first[uint32(at + g)] = before
            before = int32(before + num_tiles(lengths[g], tokens))
        first[uint32(at + groups)] = before


@cuda.jit(device=True)
def one_lane_counts_and_tells_the_others(lengths, groups, tokens, first, at):
    total = int32(0)
    if cuda.threadIdx.x & 31 == 0:
        for g in range(groups):
            first[uint32(at + g)] = total
            total = int32(total + num_tiles(lengths[g], tokens))
    first[uint32(at + groups)] = cuda.shfl_sync(FULL_MASK, total, 0)


@cuda.jit(device=True)
def every_lane_adds_up_all(lengths, groups, tokens, first, at):
    for g in range(int32(cuda.threadIdx.x & 31), groups + 1, 32):
        before = int32(0)
        for other in range(groups):
            if other < g:
                before = int32(before + num_tiles(lengths[other], tokens))
        first[uint32(at + g)] = before


@cuda.jit(device=True)
def scans_32_groups_at_a_time(lengths, groups, tokens, first, at):
    lane, carry = int32(cuda.threadIdx.x & 31), int32(0)
    for base in range(0, groups, 32):
        g = int32(base + lane)
        own = num_tiles(lengths[g], tokens) if g < groups else int32(0)
        behind = int32(carry + warp_inclusive_scan(own, lane))
        if g < groups:
            first[uint32(at + g)] = int32(behind - own)
        carry = cuda.shfl_sync(FULL_MASK, behind, 31)
    if lane == 0:
        first[uint32(at + groups)] = carry


@cuda.jit(device=True)
def rounds_down(lengths, groups, tokens, first, at):
    lane = int32(cuda.threadIdx.x & 31)
    each = int32((groups + 31) >> 5)
    begin, end, own = int32(lane * each), int32(min(int32(lane * each + each), groups)), int32(0)
    for g in range(begin, end):
        own = int32(own + divide(lengths[g], tokens))
    before = int32(warp_inclusive_scan(own, lane) - own)
    for g in range(begin, end):
        first[uint32(at + g)] = before
        before = int32(before + divide(lengths[g], tokens))
    if lane == 31:
        first[uint32(at + groups)] = before


@cuda.jit(device=True)
def stores_no_total(lengths, groups, tokens, first, at):
    lane = int32(cuda.threadIdx.x & 31)
    each = int32((groups + 31) >> 5)
    begin, end, own = int32(lane * each), int32(min(int32(lane * each + each), groups)), int32(0)
    for g in range(begin, end):
        own = int32(own + num_tiles(lengths[g], tokens))
    before = int32(warp_inclusive_scan(own, lane) - own)
    for g in range(begin, end):
        first[uint32(at + g)] = before
        before = int32(before + num_tiles(lengths[g], tokens))


# Places


@cuda.jit(device=True)
def acquires_no_map(maps, which, starts, tile):
    return int64(MAPS_BYTES) * tile.group + which, tile.row


@cuda.jit(device=True)
def counts_rows_of_all_groups(maps, which, starts, tile):
    index = int64(MAPS_BYTES) * tile.group + which
    fence_proxy_tensormap_acquire_gpu(maps, index)
    return index, int32(starts[tile.group] + tile.row)


@cuda.jit(device=True)
def takes_the_map_of_x(maps, which, starts, tile):
    index = int64(MAPS_BYTES) * tile.group
    fence_proxy_tensormap_acquire_gpu(maps, index)
    return index, tile.row


# Bands


@cuda.jit(device=True)
def whole_bands_only(table, n_tiles, number):
    band = divide(number, int32(BAND * n_tiles))
    own = int32(number - band * int32(BAND * n_tiles))
    n = divide(own, int32(BAND))
    m = int32(band * BAND + own - n * int32(BAND))
    group = answers.group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), n


@cuda.jit(device=True)
def horizontal(table, n_tiles, number):
    m = divide(number, n_tiles)
    group = answers.group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), int32(number - m * n_tiles)


@cuda.jit(device=True)
def m_of_all_groups(table, n_tiles, number):
    group, m, n = answers.in_bands(table, n_tiles, number)
    return group, int32(m + table.words[uint32(table.at + group)]), n


@cuda.jit(device=True)
def bands_by_walking_the_table(table, n_tiles, number):
    tiles = table.words[uint32(table.at + table.groups)]
    band = divide(number, int32(BAND * n_tiles))
    own, rows = int32(number - band * int32(BAND * n_tiles)), int32(min(BAND, int32(tiles - band * BAND)))
    n = divide(own, rows)
    m = int32(band * BAND + own - n * rows)
    group = int32(0)
    while table.words[uint32(table.at + group + 1)] <= m:
        group = int32(group + 1)
    return group, int32(m - table.words[uint32(table.at + group)]), n


@cuda.jit(device=True)
def counts_tiles_up_to_the_number(table, n_tiles, number):
    tiles, band, m, n = table.words[uint32(table.at + table.groups)], int32(0), int32(0), int32(0)
    for _ in range(number):
        m = int32(m + 1)
        if m == min(int32(band + BAND), tiles):
            m, n = band, int32(n + 1)
            if n == n_tiles:
                band, n = int32(band + BAND), int32(0)
                m = band
    group = answers.group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), n


# Stores


@cuda.jit(device=True)
def stores_all_16_rows(words, buffer, y, row, rows, column, pitch):
    answers.store_chunk(words, buffer, y, row, int32(16), column, pitch)


@cuda.jit(device=True)
def forgets_the_swizzle(words, buffer, y, row, rows, column, pitch):
    r, v = int32(cuda.threadIdx.x >> 3), int32(cuda.threadIdx.x & 7)
    if r < rows:
        a, b, c, d = ld_shared_s32x4(words, int32(buffer + 128 * r + (v << 4)) >> 2)
        st_global_s32x4(y, int64(row + r) * pitch + int32((column >> 1) + 4 * v), a, b, c, d)


@cuda.jit(device=True)
def a_word_of_each_lane(words, buffer, y, row, rows, column, pitch):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
    for r in range(warp, min(rows, 16), 4):
        word = words[int32(buffer >> 2) + 32 * r + ((lane >> 2 ^ (r & 7)) << 2) + (lane & 3)]
        y[int64(row + r) * pitch + int32((column >> 1) + lane)] = word


@cuda.jit(device=True)
def one_lane_stores(words, buffer, y, row, rows, column, pitch):
    if cuda.threadIdx.x == 0:
        for i in range(8 * min(rows, 16)):
            r, v = int32(i >> 3), int32(i & 7)
            a, b, c, d = ld_shared_s32x4(words, int32(buffer + 128 * r + ((v ^ (r & 7)) << 4)) >> 2)
            st_global_s32x4(y, int64(row + r) * pitch + int32((column >> 1) + 4 * v), a, b, c, d)


@cuda.jit(device=True)
def a_stub(table, m):
    pass


GROUP, COUNT, PLACE = exercises.group_of, exercises.count_tiles, exercises.place
BANDS, CHUNK = exercises.bands, exercises.store_chunk


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (GROUP, ..., OPEN, "not answered yet"),
        (GROUP, a_stub, OPEN, "not answered yet"),
        (GROUP, answers.group_of, RIGHT, "5 shared loads"),
        (GROUP, walks_through_the_table, OVER_PAR, "with 32 shared loads.*halve what is left"),
        (GROUP, stops_at_an_empty_group, WRONG, "the groups of all tiles"),
        (COUNT, answers.count_tiles, RIGHT, "5 shuffles"),
        (COUNT, scans_32_groups_at_a_time, OVER_PAR, "with 48 shuffles.*add up alone"),
        (COUNT, one_lane_counts, REFUSED, "the lengths of other lanes"),
        (COUNT, one_lane_counts_and_tells_the_others, REFUSED, "the lengths of other lanes"),
        (COUNT, every_lane_adds_up_all, REFUSED, "the lengths of other lanes"),
        (COUNT, rounds_down, WRONG, "first"),
        (COUNT, stores_no_total, WRONG, "first"),
        (PLACE, answers.place_in_group, RIGHT, "each map is acquired"),
        (PLACE, acquires_no_map, WRONG, "acquire"),
        (PLACE, counts_rows_of_all_groups, WRONG, "group 2, tile at its row 0"),
        (PLACE, takes_the_map_of_x, WRONG, "the map of y"),
        (BANDS, answers.in_bands, RIGHT, "7 shared loads"),
        (BANDS, bands_by_walking_the_table, OVER_PAR, "a search for the group"),
        (BANDS, horizontal, WRONG, r"tile 1: \(group, m, n\)"),
        (BANDS, whole_bands_only, WRONG, r"\(group, m, n\)"),
        (BANDS, m_of_all_groups, WRONG, r"\(group, m, n\)"),
        (BANDS, counts_tiles_up_to_the_number, REFUSED, "it walks through tiles"),
        (CHUNK, answers.store_chunk, RIGHT, "1 global store"),
        (CHUNK, a_word_of_each_lane, OVER_PAR, "with 4 global stores.*eight lanes"),
        (CHUNK, stores_all_16_rows, WRONG, "a row of another group"),
        (CHUNK, forgets_the_swizzle, WRONG, "one of the rows"),
        (CHUNK, one_lane_stores, REFUSED, "alone"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_tiles_and_padding_are_counted():
    check = exercises.padding.check
    assert check().state == OPEN
    assert check(tiles=32, percent=50).state == RIGHT and check(percent=52).state == RIGHT
    verdict = check(tiles=16)
    assert verdict.state == WRONG and "it is 32" in verdict.text and "percent" not in verdict.text


def test_even_tiles_are_explained_after_a_choice():
    check = exercises.even.check
    assert check().state == OPEN and "96 rows" not in check().text
    assert check("B").state == RIGHT and check("A").state == check("E").state == WRONG
    assert "the sums are the same" in check("A").text


# The page's kernels, and changes that the check must find


NOTEBOOK = ROOT / "notebooks/07_grouped_gemm.py"
OWN = "group_of", "count_tiles", "place_in_group", "in_bands", "store_chunk"


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = {name: getattr(answers, name) for name in OWN}
    return definitions(NOTEBOOK, own, r"page\.|exercises\.", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


fault = partial(fault_of, runs)
STEPS = (
    "a launch per group",
    "padding, one tensor map",
    "a tensor map per group",
    "vertical order",
    "transposed MMA",
    "tiles of 96 rows",
    "no maps of groups",
    "one group after the other",
    "even tiles",
    "two subtiles",
)


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    with simulator.seed(3):
        assert runs.check(eval(steps[name], names)) is None


@pytest.mark.parametrize("name", ["vertical order", "tiles of 96 rows", "two subtiles"])
def test_steps_have_no_races(name, right_page):
    names, steps = right_page
    with simulator.seed(5), simulator.races():
        assert runs.check(eval(steps[name], names)) is None


def test_bands_and_other_tile_sizes_are_right(right_page):
    names, _ = right_page
    versions = [Version(names["banded"], **names["MAPPED"]), names["TILES"][16] if "TILES" in names else None]
    for version in filter(None, versions):
        assert fault(version) is None
    for tokens in (16, 32, 48, 64):
        assert fault(names["transposed_version"](tokens, 8)) is None
    assert fault(Version(names["both"], **names["ONE_MAP"])) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("a launch per group", "int32(column + 2 * first), row, smem", "int32(column + first), row, smem"),
        ("a launch per group", "scaled = fma(zeros, values, scale)", "scaled = values"),
        ("a tensor map per group", "empty + s, MMA_WARPS)", "empty + s, 1)"),
        ("padding, one tensor map", "int32(starts[tile.group] + tile.row)  # one map", "tile.row  # one map"),
        ("a tensor map per group", "table.groups + 1, THREADS", "table.groups, THREADS"),
        ("a tensor map per group", "replace_rows(copies, MAP_BYTES, rows)", "pass"),
        ("a tensor map per group", "int64(starts[g]) * n", "int64(starts[g]) * k"),
        ("vertical order", "int32(number - n * tiles)", "int32(number - n)"),
        ("transposed MMA", "int32(tile.n * TILE_N + 64 * warpgroup), row, smem", "int32(tile.n * TILE_N), row, smem"),
        ("transposed MMA", "            wait_for_stores()  # the last tile's", "            pass  # the last tile's"),
        ("tiles of 96 rows", "fence_proxy_async_shared()\n        bar_sync", "bar_sync"),
        ("no maps of groups", "int32(rows - 2 * first), column", "int32(rows), column"),
        ("no maps of groups", "table.groups, tokens, table.words", "table.groups, int32(128), table.words"),
        ("one group after the other", "int32(own - n * int32(behind - before))", "int32(own - n)"),
        ("even tiles", "int32(min(size, int32(length - row)))", "size"),
        ("two subtiles", "half, held = tokens // 2, tokens // 4", "half, held = tokens // 2, tokens // 4 - 4"),
        ("two subtiles", "offset + W_BYTES + half * BLOCK_K", "offset + W_BYTES"),
        ("two subtiles", "int32(row + s * subtile)", "row"),
    ],
)  # fmt: skip
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    try:
        assert fault(eval(steps[name], names)) is not None
    except (ValueError, TypeError, IndexError):  # so wrong that it does not run
        pass


def test_whole_chunks_are_stored_over_other_groups(right_page):
    names, _ = right_page
    check, version = exercises.whole_chunks.check, Version(names["whole_chunks"], **names["ONE_MAP"])
    assert check(..., version).state == OPEN and "DataRace" not in check(..., version).text
    assert check("E", version).state == WRONG
    verdict = check("B", version)
    assert verdict.state == RIGHT and "DataRace" in verdict.text and "belongs to no group" in verdict.text


# Scores, models, tables and figures


def test_scores_say_what_changes(right_page):
    names, steps = right_page
    score = lambda name: runs.lesson.count(eval(steps[name], names), name).rows
    mapped, without, two = (score(name) for name in ("tiles of 96 rows", "no maps of groups", "two subtiles"))
    launches = "all warps", "launches of these kernels"
    assert mapped[launches] == 2 and without[launches] == 1
    stored = "all warps", "sectors stored by threads"
    assert mapped[stored] == 0 and without[stored] == two[stored] == sum(runs.SMALL_LENGTHS) * runs.SMALL_N * 2 // 32
    assert all(20 < rows[COMPILER, runs.BLOCK] < 130 for rows in (mapped, without, two))


def test_models_name_the_unit_that_takes_longest():
    few, many = runs.limits(runs.FEW, 96), runs.limits(runs.MANY, 16)
    assert few.name == "DRAM" and many.name == "L2" and many.us > runs.limits(runs.MANY, 96).us > few.us
    assert runs.tiles_of([5, 0, 129], 128) == 3
    assert runs.copies_us(4096) == 2 * runs.copies_us(2048)


def test_the_tables_have_lines():
    assert "tensor cores" in str(runs.show_bounds()) and "50%" in str(runs.show_padding())
    assert "programmatic dependent launch" in str(runs.show_what_did_not_pay())
    sweep = str(runs.show_sweep())
    assert "hpc-ops" in sweep and "by Zipf's law" in sweep and sweep.count("*") >= 10
    assert "all in one group: 93.3 against 139 us" in runs.losses() and "at least 226 us" in runs.result()


def test_peers_that_are_right_are_in_the_table(right_page, tmp_path, monkeypatch, capsys):
    version = Version(right_page[0]["grouped"], **right_page[0]["ONE_MAP"])
    use_stand_ins(monkeypatch, tmp_path)
    table = runs.show_last(version)
    assert table.headings[-2:] == ["right, us", "lower bound, us"] and "right right 1.2" in table.note
    printed = capsys.readouterr().err
    assert printed.count("peer broken is left out (") == printed.count("peer:wrong is left out, ") == len(table.lines)
    assert "peer:wrong is left out, 2048 rows, 32 groups, zipf: " in printed


def test_peers_of_the_record_are_in_the_table(right_page, monkeypatch):
    version = Version(right_page[0]["grouped"], **right_page[0]["ONE_MAP"])
    record_peers(monkeypatch, runs.lesson, ["2048 rows, 32 groups, zipf"], fast=50.0)
    monkeypatch.setattr(runs, "_find", lambda *_, **__: {"kernel_us": {"median": 300.0}})
    table = runs.show_last(version)
    times = {line[0]: line[1:-1] for line in table.lines}
    assert times["2,048 in 32 groups, by Zipf's law"] == ["200", "300", "300", "300", "50.0"]
    assert times["2,048 in 32 groups, spread evenly"] == ["200", "300", "300", "300", ""]
    assert table.note == "Other projects' kernels, timed in the same run: fast 6e2eced."
    record_peers(monkeypatch, runs.lesson, [])
    assert runs.show_last(version).note.startswith("No other project's")


def test_a_version_is_timed_only_if_it_is_right(right_page):
    names, _ = right_page
    table = runs.show_sizes("order", {"vertical": Version(names["across"], **names["MAPPED"])})
    assert "vertical" in str(table)
    broken, steps = page("int32(starts[tile.group] + tile.row)  # one map", "tile.row  # one map")
    with pytest.raises(runs.WrongResult, match="no maps: "):
        runs.show_sizes("order", {"no maps": eval(steps["no maps of groups"], broken)})


def test_figures_say_what_they_show():
    for figure in (draw.problem(), draw.tile_starts(), draw.orders(), draw.padded_work(), draw.subtiles()):
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg
    assert draw.tile_starts()._repr_svg_().count(">mixed<") == 2


def test_figures_number_tiles_as_the_page_does(right_page):
    names, _ = right_page
    counts, n_tiles = [2, 1, 3], 4
    right = exercises._ordered(names["by_group"], counts, n_tiles).tolist()
    places = [[g, m] for g, count in enumerate(counts) for m in range(count)]
    parts = re.findall(r">(\d+)</text>", draw.orders(tuple(counts), n_tiles, 6)._repr_svg_())
    for panel, order in enumerate(("horizontal", "vertical", "by_group")):
        drawn = [int(text) for text in parts[24 * panel : 24 * panel + 24]]
        found = exercises._ordered(names[order], counts, n_tiles).tolist()
        for at, number in enumerate(drawn):
            assert found[number] == [*places[at // n_tiles], at % n_tiles], (order, number)
    assert len(right) == 24


def test_the_page_runs_with_other_sizes():
    printed = run_with_sizes(
        NOTEBOOK,
        "grouped_gemm",
        GROUPS=16,
        N=1024,
        K=512,
        ROWS=512,
        SMALL_LENGTHS=(3, 40, 0, 300, 1),
        SMALL_N=128,
        SMALL_K=384,
        SMALL_SMS=4,
    )
    assert "16 groups, N = 1024, K = 512; the steps have 512 rows" in printed and "two subtiles" in printed
