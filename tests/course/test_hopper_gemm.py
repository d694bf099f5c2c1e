"""The lesson "A Hopper GEMM": steps are right, its check finds wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path

import pytest
from lesson_pages import definitions, fault_of, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, int64, uint8, uint32, uint64

from moe_numba.course.lessons.hopper import answers, draw, exercises, runs
from moe_numba.course.lessons.hopper.runs import Version, advance, wait_for_buffer, wait_for_stores
from moe_numba.course.lessons.hopper.sizes import A_BYTES, BLOCK_K, FREE, WRITTEN
from moe_numba.course.steps.score import COMPILER, Score
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]


# Answers: the third stage


@cuda.jit
def two_stages(map_x, out, boxes):
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


@cuda.jit
def three_stages_one_ahead(map_x, out, boxes):
    smem, full = cuda.shared.array(3072, uint8, 1024), cuda.shared.array(3, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(3):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(boxes):
        if thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, box % 3, 1024)
            tma_load_2d(smem, 1024 * (box % 3), map_x, 0, 0, int32(8 * box), full, box % 3)
        mbarrier_wait_parity(full, box % 3, uint32(box // 3 % 2))
        for i in range(thread, 1024, 64):
            out[1024 * box + i] = smem[1024 * (box % 3) + i]
        cuda.syncthreads()


@cuda.jit
def parity_of_two_stages(map_x, out, boxes):
    smem, full = cuda.shared.array(3072, uint8, 1024), cuda.shared.array(3, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(3):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(-2, boxes):
        ahead = int32(box + 2)
        if ahead < boxes and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, ahead % 3, 1024)
            tma_load_2d(smem, 1024 * (ahead % 3), map_x, 0, 0, 8 * ahead, full, ahead % 3)
        if box >= 0:
            mbarrier_wait_parity(full, box % 3, uint32(box // 2 % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * (box % 3) + i]
            cuda.syncthreads()


# The producer


@cuda.jit(device=True)
def starts_each_tile_at_stage_0(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    stage, phase = int32(0), uint32(1)
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, column, ring.barriers, full)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def never_waits_for_empty(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for k in range(k_blocks):
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, column, ring.barriers, full)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def announces_a_only(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, A_BYTES)
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, column, ring.barriers, full)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def swaps_row_and_column(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
        tma_load_2d(ring.smem, offset, map_a, 0, at, column, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, row, ring.barriers, full)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def waits_for_its_own_loads(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, at, column, ring.barriers, full)
        mbarrier_wait_parity(ring.barriers, full, uint32(phase ^ uint32(1)))
        stage, phase = advance(ring, stage, phase)
    return stage, phase


# Stores


@cuda.jit(device=True)
def one_loop(smem, out, acc, row, column, pitch):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
    offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
    for j in range(32):
        out[offset + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 1], acc[4 * j]))
        out[offset + 8 * pitch + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 3], acc[4 * j + 2]))


@cuda.jit(device=True)
def store_half(out, acc, offset, pitch):
    for j in range(16):
        out[offset + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 1], acc[4 * j]))
        out[offset + 8 * pitch + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 3], acc[4 * j + 2]))


@cuda.jit(device=True)
def two_halves(smem, out, acc, row, column, pitch):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
    offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
    store_half(out, acc[:64], offset, pitch)
    store_half(out, acc[64:], offset + 64, pitch)


@cuda.jit(device=True)
def first_half_twice(smem, out, acc, row, column, pitch):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
    offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
    store_half(out, acc[:64], offset, pitch)
    store_half(out, acc[:64], offset + 64, pitch)


# The order of a TMA store


@cuda.jit(device=True)
def one_lane_fences(place):
    if place == FREE:
        wait_for_buffer()
    if place == WRITTEN:
        cuda.syncwarp()
        if elect_sync(FULL_MASK):
            fence_proxy_async_shared()
    cuda.syncwarp()


@cuda.jit(device=True)
def fences_before_it_writes(place):
    if place == FREE:
        wait_for_buffer()
        fence_proxy_async_shared()
    cuda.syncwarp()


@cuda.jit(device=True)
def never_waits(place):
    if place == WRITTEN:
        fence_proxy_async_shared()
    cuda.syncwarp()


@cuda.jit(device=True)
def waits_for_all(place):
    if place == FREE:
        wait_for_stores()
    if place == WRITTEN:
        fence_proxy_async_shared()
    cuda.syncwarp()


@cuda.jit(device=True)
def stops_the_cta(place):
    if place == FREE:
        wait_for_buffer()
    if place == WRITTEN:
        fence_proxy_async_shared()
    cuda.syncthreads()


@cuda.jit(device=True)
def lanes_meet_before_the_fence(place):
    if place == FREE:
        wait_for_buffer()
    cuda.syncwarp()
    if place == WRITTEN:
        fence_proxy_async_shared()


@cuda.jit(device=True)
def lanes_never_meet(place):
    if place == FREE:
        wait_for_buffer()
    if place == WRITTEN:
        fence_proxy_async_shared()


STAGES, PRODUCER, STORE, ORDER = exercises.three_stages, exercises.producer, exercises.unrolled, exercises.order


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (STAGES, ..., OPEN, "not answered yet"),
        (STAGES, answers.load_three_stages, RIGHT, "3 boxes are in flight"),
        (STAGES, two_stages, REFUSED, "at most 2 boxes"),
        (STAGES, three_stages_one_ahead, REFUSED, "at most 1 boxes"),
        (STAGES, parity_of_two_stages, WRONG, "wait for ever|races|race|is used wrongly"),
        (PRODUCER, answers.produce, RIGHT, "3 stages are filled"),
        (PRODUCER, starts_each_tile_at_stage_0, WRONG, "wait for ever|race|wrongly|tile 1"),
        (PRODUCER, never_waits_for_empty, WRONG, "race|wrongly"),
        (PRODUCER, announces_a_only, WRONG, "race|wrongly|bytes"),
        (PRODUCER, swaps_row_and_column, WRONG, "tile 0, block 0 of k: the first byte of the rows of A"),
        (PRODUCER, waits_for_its_own_loads, REFUSED, "waits for its own loads"),
        (STORE, answers.store_unrolled, RIGHT, "64 store instructions and 0 compares"),
        (STORE, two_halves, RIGHT, "64 store instructions"),
        (STORE, one_loop, REFUSED, "the loop remains: 2 store instructions"),
        (STORE, first_half_twice, WRONG, "D"),
        (ORDER, answers.order, RIGHT, "no access races"),
        (ORDER, one_lane_fences, WRONG, "a fence is missing"),
        (ORDER, fences_before_it_writes, WRONG, "a fence is missing"),
        (ORDER, never_waits, WRONG, "make_bulk_wait_group_read"),
        (ORDER, waits_for_all, OVER_PAR, "which of the two stores"),
        (ORDER, stops_the_cta, REFUSED, "all warps of the CTA wait"),
        (ORDER, lanes_meet_before_the_fence, WRONG, "the lanes must meet after it"),
        (ORDER, lanes_never_meet, OVER_PAR, "PTX does not promise"),
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
        (answers.place_of_chunk, RIGHT, "all 32 banks"),
        (lambda row, chunk: (chunk + row // 2) % 4, RIGHT, "all 32 banks"),
        (lambda row, chunk: chunk, WRONG, "chunk 0 of rows 0 and 2 is in the same banks, 0 to 3"),
        (lambda row, chunk: chunk ^ row % 8, WRONG, r"row 4 have the places \[4, 5, 6, 7\]"),
    ],
)
def test_swizzles(answer, state, text):
    verdict = exercises.swizzle.check(answer)
    assert verdict.state == state and re.search(text, verdict.text)


def compiled(registers=90, stores=32, compares=22):
    facts = {row: 0 for row in runs.SHOWN} | {runs.REGISTERS: registers, runs.STORES: stores, runs.COMPARES: compares}
    return Score("a step", {(COMPILER, row): number for row, number in facts.items()})


def test_ctas_per_sm_are_judged_by_registers_and_shared_memory():
    check = exercises.resident.check
    assert check(compiled()).state == check(compiled(), one=...).state == OPEN
    verdict = check(compiled(), one=2, two=2, three=2, four=1)
    assert verdict.state == RIGHT and "one: registers" in verdict.text and "four: shared" in verdict.text
    assert check(compiled(), four=2).state == WRONG and check(compiled(), five=1).state == WRONG
    assert check(compiled(registers=40), one=6).state == RIGHT


def test_the_slow_tile_is_explained_after_a_choice():
    before, after = compiled(), compiled(stores=2, compares=777)
    check = lambda *choice: exercises.slow_tile.check(*choice, before, after)
    assert check(...).state == OPEN and "777" not in check(...).text
    assert check("B").state == check("E").state == WRONG
    assert check("C").state == RIGHT and "32 -> 2" in check("C").text


# The page's kernels, and changes that the check must find


NOTEBOOK = ROOT / "notebooks/06_hopper_gemm.py"


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = dict(produce=answers.produce, order=answers.order, store_256=answers.store_unrolled)
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


fault = partial(fault_of, runs)
STEPS = (
    "one stage",
    "a ring of 3 stages",
    "specialised warps",
    "persistent CTAs",
    "tile of 128 x 256",
    "unrolled stores",
    "TMA stores",
    "multicast",
    "float32 accumulation",
)


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    version = eval(steps[name], names)
    for seed in (1, 2):
        with simulator.seed(seed):
            assert runs.check(version) is None


def test_a_step_detects_races_and_runs_in_several_orders(right_page, monkeypatch):
    asked = []
    monkeypatch.setattr(runs.lesson, "_checked", lambda version, seed, races=False: asked.append((seed, races)))
    assert runs.lesson.fault(None) is None and asked == [(0, True), (1, False), (2, False), (3, False)]


def test_the_last_steps_have_no_races(right_page):
    names, steps = right_page
    with simulator.seed(5), simulator.races():
        assert runs.check(eval(steps["multicast"], names)) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("one stage", "uint32(k & 1)", "uint32(0)"),
        ("one stage", "int32(across * uint32(columns))  #", "int32(0)  #"),
        ("one stage", "(column >> 1) + (lane & 3)", "(column >> 1) + (lane & 1)"),
        ("one stage", "offset + 8 * pitch + 4 * j", "offset + 4 * pitch + 4 * j"),
        ("a ring of 3 stages", "target, _ = advance(ring, target, phase)", "target = stage"),
        (
            "a ring of 3 stages",
            "                cuda.syncthreads()  # all warps have read",
            "                # all warps have read",
        ),
        ("specialised warps", "MMA_WARPS * cluster)", "MMA_WARPS + 1)"),
        ("persistent CTAs", "release(ring, stage)  #", "pass  #"),
        ("TMA stores", "int32(column + 2 * first), row", "int32(column + first), row"),
        ("TMA stores", "(t & 7) ^ (lane >> 4)", "lane >> 4"),
        ("multicast", "0b11)", "0b01)"),
        ("multicast", "column + rank * (half >> 7)", "column"),
        ("multicast", "uint32(cluster_ctarank() ^ uint32(1))", "uint32(cluster_ctarank())"),
        ("float32 accumulation", "held, further = half // 2, half * BLOCK_K >> 4", "held, further = half // 2, 0"),
        ("float32 accumulation", "fma(acc[held:], product", "fma(acc[:held], product"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    assert fault(eval(steps[name], names)) is not None


def test_equal_parities_deadlock():
    """So does the pseudocode of the article: docs/claims.md says it."""
    names, steps = page("stage, phase = int32(0), uint32(1)", "stage, phase = int32(0), uint32(0)")
    assert fault(eval(steps["specialised warps"], names)).startswith("deadlock")


def test_bands_number_every_tile_once():
    names, _ = page("BAND = 16", "BAND = 4")
    a, b, right = runs._inputs(6 * 128, 512, 128)  # a band of four rows of tiles, and one of two
    for kernel, cluster in (("banded", 1), ("banded_pairs", 2)):
        version = Version(names[kernel], 256, 4, names["THREADS"], persistent=True, cluster=cluster, tma_store=True)
        assert runs.wrong(runs.gemm(version, a, b, runs.poisoned(len(a), len(b))), right) is None


def test_variants_and_parts_run(right_page):
    names, _ = right_page
    for kernel, columns, stages, more in (
        ("small", 128, 6, dict(tma_store=True)),
        ("three", 256, 3, dict(tma_store=True)),
        ("waiting", 256, 4, dict(tma_store=True)),
        ("banded", 256, 4, dict(tma_store=True)),
    ):
        version = Version(names[kernel], columns, stages, threads=names["THREADS"], persistent=True, **more)
        assert runs.check(version) is None
    unwaited = Version(names["unwaited"], stages=6, threads=names["THREADS"])
    assert "wgmma" in fault(unwaited)
    for part in ("only_mmas", "only_loads"):
        assert fault(Version(names[part], stages=6, threads=names["THREADS"], persistent=True)) is not None


# What the compiler makes of them


@pytest.fixture(scope="module")
def scores(right_page):
    names, steps = right_page
    return {name: runs.lesson.count(eval(version, names), name) for name, version in steps.items()}


EXPECTED_STORES = dict.fromkeys(STEPS, 32) | {"unrolled stores": 64} | dict.fromkeys(STEPS[6:], 4)


def searches(score, stores):
    """Return what shows that accumulators are searched for: registers in local memory, few stores, many compares."""
    facts = {row: score.rows[COMPILER, row] for row in runs.SHOWN}
    found = [row for row, bad in {
        runs.SPILLED: facts[runs.SPILLED] > 0,
        runs.STORES: facts[runs.STORES] != stores,
        runs.COMPARES: facts[runs.COMPARES] > 50,
    }.items() if bad]  # fmt: skip
    return found


@pytest.mark.parametrize("name", STEPS)
def test_no_accumulator_is_searched_for(name, scores):
    if name == "tile of 128 x 256":  # the wrong version, which the reader diagnoses
        assert searches(scores[name], 64) == [runs.STORES, runs.COMPARES]
    else:
        assert searches(scores[name], EXPECTED_STORES[name]) == []


def test_scores_say_what_changes(scores):
    rows = {name: score.rows for name, score in scores.items()}
    assert [rows[name][COMPILER, runs.CTAS] for name in STEPS] == [2, 2, *[1] * 7]
    loads = [int(score.rows["all warps", "bytes from L2 to shared memory"]) for score in scores.values()]
    assert (
        loads[:4] == loads[:1] * 4
        and loads[4:7] == [loads[0] * 3 // 4] * 3
        and loads[7:] == [loads[0] // 2, loads[0] * 3 // 4]
    )
    assert all(20 < rows[name][COMPILER, runs.LOOP] < 130 for name in STEPS[:-1])
    assert rows["persistent CTAs"] == rows["specialised warps"]


def test_the_search_is_shown(right_page, capsys):
    names, steps = right_page
    runs.show_first_store(eval(steps["tile of 128 x 256"], names))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16 and "STG" in lines[-1] and sum("ISETP" in line for line in lines) > 3


def test_the_main_loop_is_the_innermost_with_tensor_core_instructions():
    code = lambda opcode, target=None: {"opcode": opcode, "target": target}
    sass = [code("MOV"), code("LDS"), code("QGMMA.64x8x32"), code("BRA", 1), code("BRA", 0), code("BRA", 5)]
    assert runs.main_loop(sass) == (1, 4) and runs.main_loop(sass[3:]) == (0, 0)


# Tables and figures


def test_the_tables_have_lines():
    assert "128 x 256" in str(runs.show_shapes()) and "100%" in str(runs.show_shapes())
    assert "linked CUDA C++" in str(runs.show_what_did_not_pay())
    assert "us at the data sheet's FP8 peak" in runs.lower_bound() and "one stage" in runs.result()


def test_wrong_elements_are_named():
    right = runs._inputs(*runs._shape())[2]
    out = right.bfloat16()
    assert runs.wrong(out, right) is None
    out[3, 5] += 40
    assert "D[3, 5] is" in runs.wrong(out, right) and "1 of" in runs.wrong(out, right)
    out[7, 1] = float("nan")
    assert "1 were never written" in runs.wrong(out, right)


def test_figures_say_what_they_show():
    for figure in (draw.tile(128), draw.tile(256), draw.roles(), draw.multicast(), draw.timeline()):
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg


def test_the_page_runs_with_other_sizes():
    printed = run_with_sizes(
        NOTEBOOK, "hopper", M=2048, N=1024, K=1024, SMALL_M=512, SMALL_N=256, SMALL_K=640, SMALL_SMS=4
    )
    assert "D is 2048 x 1024, and K is 1024" in printed and "float32 accumulation" in printed
    assert "first edition: cuBLAS" not in printed
