"""The lesson on one kernel: steps are right, checks find wrong kernels, exercises judge answers and cheats."""

import re
from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, fault_of, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32

from moe_numba.course.lessons.one_kernel import answers, draw, exercises, model, runs, tables
from moe_numba.course.lessons.one_kernel.runs import Sizes, Version
from moe_numba.course.lessons.one_kernel.tile import CHAIN, row_tiles, wait_for
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.atomics import ld_volatile_s32, red_add_relaxed_gpu_s32

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/16_one_kernel.py"


# Answers: the places


@cuda.jit(device=True)
def stub(*arguments):
    pass


@cuda.jit(device=True)
def only_earlier_experts(counts, at, ranks, experts, source, g):
    return answers.place_of(counts, at, ranks, experts, int32(0), g)


@cuda.jit(device=True)
def from_the_first_rank_on(counts, at, ranks, experts, source, g):
    place = int32(0)
    for e in range(g + 1):
        for s in range(ranks if e < g else source):
            place = int32(place + counts[at + s * ranks * experts + e])
    return place


@cuda.jit(device=True)
def rank_by_rank(counts, at, ranks, experts, source, g):
    """The rows of a rank together: they are not in the order of the experts."""
    place = int32(0)
    for s in range(source + 1):
        for e in range(g // experts * experts, g if s == source else g // experts * experts + experts):
            if s < ranks:
                place = int32(place + counts[at + s * ranks * experts + e])
    return place


@cuda.jit(device=True)
def loads_all(counts, at, ranks, experts, source, g):
    place = int32(0)
    for e in range(g // experts * experts, g + 1):
        for s in range(ranks):
            count = counts[at + s * ranks * experts + e]
            if e < g or s < source:
                place = int32(place + count)
    return place


# The wait of the second GEMM


@cuda.jit(device=True)
def waits_for_all(done, lengths, e, experts, counts_of_a_tile):
    for other in range(experts):
        wait_for(done, other, row_tiles(lengths[other]) * counts_of_a_tile)


@cuda.jit(device=True)
def waits_for_one_tile(done, lengths, e, experts, counts_of_a_tile):
    wait_for(done, e, counts_of_a_tile if lengths[e] > 0 else 0)


@cuda.jit(device=True)
def waits_for_rows(done, lengths, e, experts, counts_of_a_tile):
    wait_for(done, e, lengths[e] * counts_of_a_tile)


@cuda.jit(device=True)
def does_not_wait(done, lengths, e, experts, counts_of_a_tile):
    wait_for(done, e, 0)


@cuda.jit(device=True)
def without_acquire(done, lengths, e, experts, counts_of_a_tile):
    while ld_volatile_s32(done, e) < row_tiles(lengths[e]) * counts_of_a_tile:
        cuda.syncwarp()


@cuda.jit(device=True)
def counts_itself(done, lengths, e, experts, counts_of_a_tile):
    answers.wait_for_expert(done, lengths, e, experts, counts_of_a_tile)
    red_add_relaxed_gpu_s32(done, e, int32(0))


# Orders


@cuda.jit(device=True)
def ascending(n, begin, end, cta, ctas):
    return int32(begin + cta + n * ctas)


@cuda.jit(device=True)
def second_gemm_first(n, begin, end, cta, ctas):
    tile = int32(begin + cta + n * ctas)
    half = int32((end - begin) // 2)
    return int32(tile + half if tile < begin + half else tile - half)


@cuda.jit(device=True)
def always_the_last(n, begin, end, cta, ctas):
    return int32(end - 1)


@cuda.jit(device=True)
def consecutive(n, begin, end, cta, ctas):
    tiles = int32(end - begin)
    many, rest = int32(tiles // ctas), int32(tiles % ctas)
    return int32(begin + cta * many + min(cta, rest) + n)


PLACES, WAIT, ORDER = exercises.place_of, exercises.wait_for_expert, exercises.deadlock


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (PLACES, ..., OPEN, "not answered yet"),
        (PLACES, stub, OPEN, "not answered yet"),
        (PLACES, answers.place_of, RIGHT, r"with (\d+) loads; par is \1"),
        (PLACES, only_earlier_experts, WRONG, "the places, for each expert and rank"),
        (PLACES, from_the_first_rank_on, WRONG, "the places, for each expert and rank"),
        (PLACES, rank_by_rank, WRONG, "the places, for each expert and rank"),
        (PLACES, loads_all, OVER_PAR, "which do not come before|Which counts do you load"),
        (WAIT, ..., OPEN, "not answered yet"),
        (WAIT, stub, OPEN, "not answered yet"),
        (WAIT, answers.wait_for_expert, RIGHT, "0 stores and atomics"),
        (WAIT, waits_for_all, WRONG, "wait for ever"),
        (WAIT, waits_for_rows, WRONG, "wait for ever"),
        (WAIT, waits_for_one_tile, WRONG, "what was read of expert|race"),
        (WAIT, does_not_wait, WRONG, "what was read of expert|race"),
        (WAIT, without_acquire, WRONG, "what was read of expert|race"),
        (WAIT, counts_itself, OVER_PAR, "A wait only reads"),
        (ORDER, ..., OPEN, "not answered yet"),
        (ORDER, stub, OPEN, "not answered yet"),
        (ORDER, answers.descending, RIGHT, "each tile is computed once, and.*Deadlock.*polls done"),
        (ORDER, second_gemm_first, RIGHT, "each tile is computed once, and.*Deadlock"),
        (ORDER, ascending, WRONG, "the kernel ends"),
        (ORDER, consecutive, WRONG, "the kernel ends"),
        (ORDER, always_the_last, WRONG, "not every tile is computed once"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)
    assert state != REFUSED


def test_explanations_come_after_an_answer():
    early, orders, home = exercises.early.check, exercises.orders.check, exercises.way_home.check
    assert early().state == OPEN and "no order" not in early().text
    assert early("A").state == early("B").state == WRONG and early("c").state == RIGHT
    assert orders().state == OPEN and orders("C").state == RIGHT and "ascend" in orders("A").text
    right = model.bytes_of(8, 4096).combine_per_expert / tables.rates().wire
    assert home().state == OPEN and home(microseconds=1.3 * right).state == WRONG
    assert home(microseconds=0.95 * right).state == RIGHT
    second = model.gemms_us(tables.rates(), 4096)[1]
    assert ("sets the end" in home(microseconds=right).text) == (second < right)


# The page's kernels, and changes that the check must find

OWN = dict(place_of=answers.place_of, wait_for_expert=answers.wait_for_expert)


def page(right="", wrong=""):
    return definitions(NOTEBOOK, OWN, r"page\.|exercises\.\w+\.use", right, wrong)[0]


def versions(names):
    make, exchange = names["make_kernel"], names["make_exchange"](answers.place_of)
    everything = names["rows_of_all"], names["first_gemm_of_all"], names["place_in_y"]
    expert = names["rows_of_expert"], answers.wait_for_expert
    return {
        "launches by expert": Version(exchange, make(*everything), CHAIN),
        "one launch": Version(exchange, make(*everything)),
        "rows of an expert": Version(exchange, make(names["rows_of_expert"], *everything[1:])),
        "tiles of an expert": Version(exchange, make(*expert, names["place_in_y"])),
        "rows go home": Version(exchange, make(*expert, names["place_at_home"])),
        "the leader counts": Version(exchange, make(*expert, names["place_at_home"], names["at_the_change"])),
    }


@pytest.fixture(scope="module")
def right_page():
    return page()


def test_the_page_has_these_steps(right_page):
    steps = re.findall(r'^step\("([^"]*)"', NOTEBOOK.read_text(), re.M)
    assert list(dict.fromkeys(steps)) == list(versions(right_page))


@pytest.mark.parametrize("name", versions(page()))
def test_all_steps_are_right_without_races(name, right_page):
    with runs.lesson.conditions(5, True):
        assert runs.check(versions(right_page)[name]) is None


WRONG_KERNELS = [
    ("launches by expert", "red_add_release_sys_s32(remote, memory.arrived + e, sent)", "pass"),
    ("launches by expert", "state[2 + e] = int32(state[2 + e] + lengths[e])", "state[2 + e] = lengths[e]"),
    ("launches by expert", "(call & 1) * ranks * all_experts)", "0 * ranks)"),
    ("one launch", "wait_for(local, memory.arrived + other, state[2 + other])", "pass"),
    ("one launch", "wait_for(local, memory.returned, state[1])", "pass"),
    ("one launch", "experts, rank, g)  # <-- a hole", "experts, int32(0), g)"),
    ("one launch", "wait_for(done, other, row_tiles(lengths[other]) * counts_of_a_tile)", "pass"),
    ("one launch", "wait_for(done, experts + e, row_tiles(lengths[e]) * pieces)", "pass"),
    ("rows of an expert", "    return e, int32(e + 1)", "    return e, e"),
    ("rows of an expert", "    return e, int32(e + 1)", "    return int32(0), int32(1)"),
    ("tiles of an expert", "                fence_acq_rel_gpu()\n", ""),
    ("tiles of an expert", "                    cuda.syncwarp()  # all lanes have stored\n", ""),
    ("tiles of an expert", "memory.arrived + e, sent)", "memory.arrived, sent)"),
    ("rows go home", "memory.assignments == lane)", "memory.assignments == 0)"),
    ("rows go home", "origin - rank * memory.assignments", "origin % 3"),
    ("the leader counts", "mbarrier_wait_parity(barriers, 2 + (n & 1), n >> 1 & 1)", "pass"),
    ("the leader counts", "return is_second and not was_second", "return False"),
    ("the leader counts", "2 + slot, WARPS)", "2 + slot, 1)"),
]


@pytest.mark.parametrize("name, right, wrong", WRONG_KERNELS)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    version = versions(page(right, wrong))[name]
    assert any(runs.lesson._checked(version, seed, races=seed > 3) for seed in range(8))


def test_a_kernel_that_sends_nothing_to_others_is_wrong():
    """Outputs are poisoned and inputs random: only other ranks have the rows."""
    right = "int32(0), memory_of(memory, d)"
    own = versions(page(right, "int32(0), memory_of(memory, memory.rank)"))["one launch"]
    assert fault_of(runs.lesson.run, own)


def test_wrong_kernels_of_the_page_are_found(right_page):
    make, expert = right_page["make_kernel"], (right_page["rows_of_expert"], answers.wait_for_expert)
    exchange, home = right_page["make_exchange"](answers.place_of), right_page["place_at_home"]
    late = runs.lesson.orders(Version(exchange, make(*expert, home, right_page["never"])), seeds=1)
    assert "Deadlock" in late.error and "polls done" in late.error
    send = right_page["send_counts_first"]
    early = runs.lesson.orders(Version(exchange, make(*expert, home, None, right_page["ascending"], send)), seeds=1)
    assert early.wrong and "DataRace" in early.race
    assert "DataRace" in tables.brief(early) and "more lines" in tables.brief(early)
    backwards = Version(exchange, make(*expert, home, None, answers.descending))
    assert "Deadlock" in runs.lesson.orders(backwards, seeds=1).error


def test_parts_overlap_more_from_step_to_step(right_page):
    of = versions(right_page)
    shares = {name: tables.shares_of(of[name]) for name in ("one launch", "rows of an expert", "rows go home")}
    assert shares["one launch"][0] == shares["one launch"][1] == 0
    assert shares["rows of an expert"][0] > 0 and shares["rows of an expert"][1] == 0
    assert shares["rows go home"][2] > shares["rows of an expert"][2]


# Model, tables, figures


@pytest.mark.parametrize("ranks", model.RANKS)
def test_each_step_of_the_model_ends_earlier(ranks):
    steps = model.steps_us(model.rates(), ranks, 4096, launch_us=1.0)
    assert list(steps) == sorted(steps, reverse=True) and steps.launches == steps.one_launch + 3
    assert steps.rows_go_home == model.one_kernel(model.rates(), ranks, 4096).sums


def test_the_tables_have_lines():
    assert "not recorded" in str(tables.show_records()) or "one kernel" in str(tables.show_records())
    for show in (tables.show_bounds, tables.show_bytes, tables.show_lost, tables.show_model, tables.show_balance):
        assert len(str(show()).splitlines()) > 4
    assert "us" in tables.result() and "us" in tables.tail() and "us" in tables.fences() and "GB/s" in tables.rate()
    assert all("Prediction" in tables.predict(step) for step in model.Steps._fields[1:])
    code = tables.show_code("def count_stored")
    assert code.startswith("def count_stored") and "return" in code.splitlines()[-1] and code.count("def ") == 1


def test_one_kernel_is_shown_once_it_is_recorded(monkeypatch):
    record = tables.records.read(tables.RECORD)
    like = next(row for row in record["rows"] if row["size"]["tokens"] == 4096 and row["config"]["ranks"] == 2)
    row = like | {"step": "one kernel", "dtype": "e4m3", "kernel_us": {"median": 2345.0}}
    rows = [each for each in record["rows"] if each["step"] != "one kernel"]
    monkeypatch.setattr(tables.records, "read", lambda name, *more: {**record, "rows": [*rows, row]})
    assert "2345" in str(tables.show_records())
    monkeypatch.setattr(tables.model, "one_kernel", lambda *_: model.Timeline(*[1.0] * 5))
    monkeypatch.setattr(tables, "rates", lambda: None)
    assert "2345 us in one kernel" in tables.result()


def test_figures_say_what_they_show():
    parts = {2: {"dispatch": 200.0, "first GEMM": 1800.0, "second GEMM": 900.0, "combine": 250.0}}
    chain = draw.chain(parts)._repr_svg_()
    assert "1800" in chain and "drawing-orange" in chain
    assert "second GEMM of the expert" in draw.dependencies()._repr_svg_()
    timeline = model.Timeline(30.0, 1800.0, 2700.0, 2750.0, 2800.0)
    assert "after 2800" in draw.kernel({2: (340.0, timeline)})._repr_svg_()
    places = draw.places([[3, 1, 0, 2], [1, 2, 2, 1]], 0, 2)._repr_svg_()
    assert "expert 1" in places and "from rank 1" in places
    with pytest.raises(ValueError, match="the number of rows"):
        draw.places([[30, 1]], 0, 2)


def test_rows_are_ordered_by_expert_and_the_reference_is_right():
    ids = torch.tensor([[2, 0], [1, 2]])
    first_rows, tokens, rows = runs.order_of(ids, 4)
    assert first_rows.tolist() == [0, 1, 2, 4, 4] and tokens.tolist() == [0, 1, 0, 1]
    assert rows.tolist() == [[2, 0], [1, 3]]
    sizes = Sizes(1, 2, 1, 16, 16, 1)
    inputs = runs.random_inputs(sizes, 1)
    call = inputs.calls[0]
    expert = int(call.topk_ids[0])
    gate, up = (inputs.w13[0][expert].float() @ call.x[0][0].float()).chunk(2)
    row = inputs.w2[0][expert].float() @ (torch.nn.functional.silu(gate) * up).bfloat16().float()
    expected = call.topk_weights[0] * row.bfloat16().float()
    assert torch.allclose(runs.reference(inputs, call, 0), expected, rtol=1e-2, atol=1e-3)


def test_the_simulators_process_finds_the_lesson():
    assert runs.lesson.home == f"{runs.__name__}:lesson"


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_page_runs_with_other_numbers_of_ranks(ranks):
    sizes = dict(SMALL_TOKENS=17) if ranks == 1 else dict(SMALL_TOKENS=2, SMALL_LOCAL_EXPERTS=1, SMALL_CTAS=1, ROUNDS=2)
    printed = run_with_sizes(NOTEBOOK, "one_kernel", RANKS=ranks, **sizes)
    assert "the leader counts" in printed and "as above:\nwrong under 0 of 4" in printed
