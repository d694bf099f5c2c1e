"""The lesson "The gate, for decode": its exercises judge answers and cheats, and its check finds wrong kernels."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.gate_decode import draw, exercises, runs
from moe_numba.course.lessons.gate_decode.runs import EXPERTS, FULL, GROUPS, LANES, LOADED, START, STORED
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.runtime.changed_source import define

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")


@cuda.jit(device=True)
def without_the_smaller_first(first, second):
    for s in range(2):
        other, other_second = cuda.shfl_xor_sync(FULL, first, 1 << s), cuda.shfl_xor_sync(FULL, second, 1 << s)
        second = max(second, other_second)
        first = max(first, other)
    return first, second


@cuda.jit(device=True)
def half_of_the_group(first, second):
    other, other_second = cuda.shfl_xor_sync(FULL, first, 1), cuda.shfl_xor_sync(FULL, second, 1)
    return max(first, other), max(min(first, other), max(second, other_second))


@cuda.jit(device=True)
def by_shared_memory(first, second):
    keys, lane = cuda.shared.array((2, 64), int32), cuda.threadIdx.x
    keys[0, lane], keys[1, lane] = first, second
    cuda.syncthreads()
    start, best, following = lane // 4 * 4, int32(-(1 << 31)), int32(-(1 << 31))
    for i in range(8):
        key = keys[i // 4, start + i % 4]
        following = max(following, min(best, key))
        best = max(best, key)
    return best, following


@cuda.jit(device=True)
def by_redux(first, second):
    lane = cuda.threadIdx.x & 31
    mask = uint32(0xF << (lane // 4 * 4))
    best = redux_sync_max_s32(mask, first)
    holder = cuda.ffs(uint32(cuda.ballot_sync(FULL, first == best)) & mask) - 1
    return best, redux_sync_max_s32(mask, second if lane == holder else first)


@cuda.jit(device=True)
def in_a_ring(first, second):
    a, b = first, second
    for d in (1, 2, 3):
        other, other_second = cuda.shfl_xor_sync(FULL, a, d), cuda.shfl_xor_sync(FULL, b, d)
        second = max(min(first, other), max(second, other_second))
        first = max(first, other)
    return first, second


@cuda.jit(device=True)
def no_rule_for_ties(key, lane):
    better = int32(0)
    for d in range(1, GROUPS):
        better = int32(better + int32(cuda.shfl_xor_sync(FULL, key, d * LANES) > key))
    return better


@cuda.jit(device=True)
def higher_groups_win(key, lane):
    better = int32(0)
    for d in range(1, GROUPS):
        rival = cuda.shfl_xor_sync(FULL, key, d * LANES)
        better = int32(better + int32((rival > key) | ((rival == key) & ((lane ^ d * LANES) > lane))))
    return better


@cuda.jit(device=True)
def all_groups(key, lane):
    better = int32(0)
    for g in range(GROUPS):
        rival = cuda.shfl_sync(FULL, key, g * LANES)
        better = int32(better + int32((rival > key) | ((rival == key) & (g < lane // LANES))))
    return better


@cuda.jit(device=True)
def from_group_to_group(key, lane):  # each shuffle waits for the one before
    rival, group, better = key, int32(lane // LANES), int32(0)
    for d in range(1, GROUPS):
        rival = cuda.shfl_sync(FULL, rival, (lane + LANES) & 31)
        is_lower = (group + d) % GROUPS < group
        better = int32(better + int32((rival > key) | ((rival == key) & is_lower)))
    return better


@cuda.jit(device=True)
def by_eight_maxima(key, lane):  # each redux waits for the vote before
    left, place = key, int32(0)
    for k in range(GROUPS):
        best = redux_sync_max_s32(uint32(FULL), left)
        winner = int32((cuda.ffs(cuda.ballot_sync(FULL, left == best)) - 1) // LANES)
        if winner == lane // LANES:
            place, left = int32(k), int32(-(1 << 31))
    return place


@cuda.jit(device=True)
def by_two_shuffles_and_two_votes(key, lane):  # as the package does it
    group, part, better = int32(lane // LANES), int32(lane % LANES), int32(0)
    own = uint32(uint32(0xF) << uint32(group * LANES))
    for i in range(GROUPS // LANES):
        rival = int32(part + i * LANES)
        rival_key = cuda.shfl_sync(FULL, key, rival * LANES)
        is_better = (rival_key > key) | ((rival_key == key) & (rival < group))
        better = int32(better + cuda.popc(uint32(cuda.ballot_sync(FULL, is_better)) & own))
    return better


@cuda.jit(device=True)
def groups_in_shared_memory(key, lane):
    keys, better, warp = cuda.shared.array((2, GROUPS), int32), int32(0), cuda.threadIdx.x // 32
    keys[warp, lane // LANES] = key
    cuda.syncthreads()
    for g in range(GROUPS):
        rival = keys[warp, g]
        better = int32(better + int32((rival > key) | ((rival == key) & (g < lane // LANES))))
    return better


@cuda.jit(device=True)
def higher_expert_wins(value, expert):
    key = redux_sync_max_s32(uint32(FULL), int32(uint32(uint32(value) << uint32(16)) | uint32(expert)))
    return int32(key >> 16), int32(key & 0xFFFF)


@cuda.jit(device=True)
def positive_values_only(value, expert):
    key = redux_sync_max_s32(uint32(FULL), int32((abs(value) << 15) | (0x7FFF - expert)))
    return int32(key >> 15), int32(0x7FFF - (key & 0x7FFF))


@cuda.jit(device=True)
def asks_the_holder(value, expert):
    best = redux_sync_max_s32(uint32(FULL), value)
    expert = int32(-redux_sync_max_s32(uint32(FULL), int32(-expert if value == best else -0xFFFF)))
    return best, expert


@cuda.jit(device=True)
def value_alone(value, expert):
    return redux_sync_max_s32(uint32(FULL), value)


@cuda.jit(device=True)
def best_by_shuffles(value, expert):
    for s in range(5):
        other, other_expert = cuda.shfl_xor_sync(FULL, value, 1 << s), cuda.shfl_xor_sync(FULL, expert, 1 << s)
        if (other > value) | ((other == value) & (other_expert < expert)):
            value, expert = other, other_expert
    return value, expert


@cuda.jit(device=True)
def never_waits(place):
    if place == LOADED:
        griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def waits_after_the_loads(place):
    if place == LOADED:
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def releases_before_it_waits(place):
    if place == START:
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()


@cuda.jit(device=True)
def releases_at_the_end(place):
    if place == START:
        griddepcontrol_wait()
    if place == STORED:
        griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def releases_after_the_loads(place):
    if place == START:
        griddepcontrol_wait()
    if place == LOADED:
        griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def only_waits(place):
    if place == START:
        griddepcontrol_wait()


TWO, RANK, BEST, ORDER = exercises.TWO, exercises.GROUP_RANK, exercises.BEST, exercises.ORDER


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (TWO, ..., OPEN, "not answered yet"),
        (TWO, exercises.two_largest, RIGHT, "4 shuffles; par is 4"),
        (TWO, without_the_smaller_first, WRONG, r"in lane \d+ the second largest key of its group is"),
        (TWO, half_of_the_group, WRONG, r"in lane \d+ the largest key of its group is"),
        (TWO, in_a_ring, OVER_PAR, "6 shuffles; par is 4"),
        (TWO, by_shared_memory, REFUSED, "shared memory"),
        (TWO, by_redux, REFUSED, "uses"),
        (RANK, exercises.better_groups, RIGHT, "7 shuffles; par is 7"),
        (RANK, no_rule_for_ties, WRONG, "the number of better groups"),
        (RANK, higher_groups_win, WRONG, "the number of better groups"),
        (RANK, all_groups, OVER_PAR, "8 shuffles; par is 7"),
        (RANK, by_two_shuffles_and_two_votes, RIGHT, "2 shuffles; par is 7"),
        (RANK, from_group_to_group, OVER_PAR, "with 7 shuffles; par is 7. But the dependent chain .* waits for"),
        (RANK, by_eight_maxima, OVER_PAR, "with 0 shuffles; par is 7. But the dependent chain .* waits for"),
        (RANK, groups_in_shared_memory, REFUSED, "shared memory"),
        (BEST, exercises.best_of_warp, RIGHT, "1 reduction; par is 1"),
        (BEST, higher_expert_wins, WRONG, "its expert"),
        (BEST, positive_values_only, WRONG, "the largest value"),
        (BEST, value_alone, WRONG, "must return two values: the largest value and its expert"),
        (BEST, asks_the_holder, OVER_PAR, "2 reductions; par is 1"),
        (BEST, best_by_shuffles, REFUSED, "it uses shuffles"),
        (ORDER, exercises.wait_then_release, RIGHT, "no access races"),
        (ORDER, never_waits, WRONG, "two threads race.*needs griddepcontrol_wait first"),
        (ORDER, waits_after_the_loads, WRONG, "two threads race.*needs griddepcontrol_wait first"),
        (ORDER, releases_before_it_waits, WRONG, "griddepcontrol_wait before griddepcontrol_launch_dependents"),
        (ORDER, releases_at_the_end, OVER_PAR, "only when this one has stored"),
        (ORDER, releases_after_the_loads, OVER_PAR, "only when this one has issued its loads"),
        (ORDER, only_waits, OVER_PAR, "only when this one ends"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


# The page's kernels, and changes that the check must find


LEFT_OUT = {
    *("page.parts", "page.rounds_fewer", "page.dependent_launch", "page.dependent_launches", "predict"),
    *(f"exercises.{name}.use" for name in ("two_largest_keys", "group_rank", "dependent", "packed")),
}


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage of its source replaced; they run no steps and no tables."""
    source = (Path(__file__).parents[2] / "notebooks/02_gate_decode.py").read_text()
    assert not right or source.count(right) == 1, right
    tree = ast.parse(source.replace(right, wrong) if right else source)
    keep = lambda node: (
        isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        or isinstance(node, ast.Assign)
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in LEFT_OUT)
    )
    answers = [f"{name} = exercises.{name}\n" for name in ("two_largest", "better_groups", "best_of_warp")]
    answers.append("order = exercises.wait_then_release\n")
    text = "\n\n".join(ast.unparse(node) for node in tree.body if keep(node))
    names = {"__name__": f"page_{next(_numbers)}", "exercises": exercises}
    exec("".join(answers), names)
    return define(text, names, f"{names['__name__']}.py")


_numbers = itertools.count()
STEPS = "first", "counted", "reduced", "popped", "unvoted", "held", "late", "last"


def test_all_steps_are_right():
    found = page()
    assert [runs.check(found[name]) for name in STEPS] == [None] * len(STEPS)
    assert runs.check(found["unchecked"]) is not None
    with simulator.races():
        assert runs.check(found["last"]) is None
    for pick in ("pick_with_best_of_warp", "pop_packed"):
        assert runs.check_small(found["make_small_gate"](found[pick])) is None


LOOK = "            if keys[i] > best:\n                best, expert = keys[i], int32(lane * HELD + i)\n        for s"
HOLDER = "cuda.ffs(cuda.ballot_sync(FULL, best == winner)) - 1"


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("first", "(other_group < group)", "(other_group > group)"),
        ("first", "(other_expert < expert)", "(other_expert > expert)"),
        ("first", LOOK, LOOK.replace(">", ">=")),
        ("counted", "lane) < KEPT", "lane) <= KEPT"),
        ("reduced", HOLDER, "31 - cuda.clz(cuda.ballot_sync(FULL, best == winner))"),
        ("popped", "is_tied = is_tied | (wins & (queue[1] == best))\n        for", "for"),
        ("unvoted", "(uint32(ballot & uint32(ballot - uint32(1))) != uint32(0))", "False"),
        ("unvoted", "!= uint32(0)) | (wins & (queue[1] == best))", "!= uint32(0))"),
        ("held", "weight = held if position == i", "weight = held if position == i + 1"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    assert runs.check(page(right, wrong)[name]) is not None


def test_rows_that_lose_a_pick():
    check, row = exercises.lost_pick.check, torch.randn(EXPERTS)
    unchecked = page()["unchecked"]
    assert check(unchecked).state == check(unchecked, None).state == OPEN
    assert "finite" in check(unchecked, row[:5]).text
    assert "ties among logits are too easy" in check(unchecked, torch.zeros(EXPERTS)).text
    assert check(unchecked, row).state == WRONG
    tied = row.clamp(max=3) + torch.arange(EXPERTS) * 1e-4
    tied[0], tied[100] = 20, 21
    assert check(unchecked, tied).state == RIGHT


def test_the_part_that_adds_most_is_named_after_a_choice():
    us = runs.Parts({"launch": 1.0, "groups": 1.2, "picks": 2.5}, "estimated")
    check = exercises.largest_part.check
    assert check(us).state == OPEN and "picks" in check(us).text
    assert check(us, "groups").state == WRONG and check(us, "picks").state == RIGHT
    assert check(us, "stores").state == WRONG
    assert check(us, "Picks").state == check(us, " pick").state == RIGHT
    assert check(us, "").state == WRONG
    assert [line[0] for line in runs.show_parts(us).lines] == ["launch", "... + groups", "... + picks"]


def test_differences_of_parts_are_those_of_the_numbers_shown():
    table = runs.show_parts(runs.Parts({"a": 1.0, "b": 2.918, "c": 2.985}, "recorded"))
    shown = [float(line[1]) for line in table.lines]
    assert [float(line[2]) for line in table.lines[1:]] == pytest.approx([b - a for a, b in itertools.pairwise(shown)])


def test_instructions_are_those_of_the_machine_code():
    """Loops are unrolled, so each instruction of a line is executed less often than the line."""
    given = page()
    counted, reduced = (runs.lesson.count(given[name], name).rows["all warps", "instructions"] for name in STEPS[1:3])
    assert 64 * 300 < reduced < counted < 64 * 1200


def times(monkeypatch):
    """Return a dict into which `lesson.times` puts its calls; it finds no times."""
    found = {}
    monkeypatch.setattr(runs.lesson, "times", lambda name, calls: found.update(calls) or {})
    return found


def test_timed_ties_launch_the_kernel_alone(monkeypatch):
    """An output that a call makes is filled by two more kernels, which a GPU would time."""
    found, version = times(monkeypatch), page()["popped"]
    monkeypatch.setattr(runs, "_votes", lambda *given: 0)
    runs.show_ties({"popped": version})
    monkeypatch.setattr(runs, "outputs", lambda *sizes: pytest.fail("a timed call allocates and fills outputs"))
    assert len(found) == 3
    for call in found.values():
        call()


def test_what_dependent_launches_save_is_said_as_measured():
    conclude = runs.conclude_from_launches
    assert conclude({"empty": [0.5, 0.4], "short": None, "gate": None}) is None
    assert "no part in it" in conclude({"empty": [0.5, 0.4], "short": [1.2, 0.95], "gate": [1.7, 1.44]})
    assert "has a part in it" in conclude({"empty": [0.5, 0.4], "short": [1.2, 1.08], "gate": [1.7, 1.44]})


def test_links_have_the_labels_of_the_record_in_the_simulator(monkeypatch):
    found, given = times(monkeypatch), page()
    runs.show_chains({"redux": given["make_chain"](given["redux"])})
    steps = {row["step"] for row in runs.records.recorded("gate_decode_ladder")["rows"]}
    assert {f"chains: {label}" for label in found} <= steps


def test_tables_fold_what_the_page_has_shown():
    found = runs.show_peers()
    assert all(line[0] == "256, 8, 4, 8" for line in found.shown.lines) and found.shown.lines
    assert not any(line[0] == "256, 8, 4, 8" for line in found.hidden.lines)
    assert "<details><summary>" in found._repr_html_() and str(found.hidden) in str(found)


def test_figures_say_what_they_show():
    for figure in (draw.chains(), draw.lanes(), draw.overlap()):
        assert figure._repr_svg_().startswith("<svg") and "prefers-color-scheme: dark" in figure._repr_svg_()
    rounds = {name: sum(columns for _, columns, _ in parts) for name, parts in draw.CHAINS.items()}
    assert list(rounds.values()) == sorted(rounds.values(), reverse=True)
