"""The lesson "The gate, for a prompt": exercises, the kernels of the page, its tables and figures."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.bench import records
from moe_numba.course.lessons.gate import draw
from moe_numba.course.lessons.gate import exercises as answers
from moe_numba.course.lessons.gate import prompt as page
from moe_numba.course.lessons.gate.sizes import FULL, GROUPS, HELD, NEVER, SHARE
from moe_numba.course.pages.prose import NOT_MEASURED
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.runtime.changed_source import define
from moe_numba.runtime.sass import compile_apart

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the lesson's harness is checked in the simulator")

PATH = Path(__file__).parents[2] / "notebooks" / "01_gate_prompt.py"


# Exercises: the lesson's own answers, wrong ones, ones over par, and ones that avoid the task


@cuda.jit(device=True)
def one_exchange(first, second):
    other_first, other_second = cuda.shfl_xor_sync(FULL, first, 1), cuda.shfl_xor_sync(FULL, second, 1)
    return max(first, other_first), max(max(second, other_second), min(first, other_first))


@cuda.jit(device=True)
def only_the_largest(first, second):
    return max(first, cuda.shfl_xor_sync(FULL, first, 1))


@cuda.jit(device=True)
def seconds_forgotten(first, second):
    for d in (1, 2):
        other = cuda.shfl_xor_sync(FULL, first, d)
        cuda.shfl_xor_sync(FULL, second, d)
        first, second = max(first, other), min(first, other)
    return first, second


@cuda.jit(device=True)
def each_lane_in_turn(first, second):
    lane, best, next_best = cuda.threadIdx.x, float32(-1e30), float32(-1e30)
    for i in range(SHARE):
        source = lane // SHARE * SHARE + i
        a, b = cuda.shfl_sync(FULL, first, source), cuda.shfl_sync(FULL, second, source)
        next_best = max(max(next_best, b), min(best, a))
        best = max(best, a)
    return best, next_best


@cuda.jit(device=True)
def largest_in_shared_memory(first, second):
    board = cuda.shared.array((4, 32, 2), float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    board[warp, lane, 0], board[warp, lane, 1] = first, second
    for d in (1, 2):  # shuffles without a use
        cuda.shfl_xor_sync(FULL, first, d)
        cuda.shfl_xor_sync(FULL, second, d)
    cuda.syncwarp()
    best, next_best = float32(-1e30), float32(-1e30)
    for i in range(SHARE):
        a, b = board[warp, lane // SHARE * SHARE + i, 0], board[warp, lane // SHARE * SHARE + i, 1]
        next_best = max(max(next_best, b), min(best, a))
        best = max(best, a)
    return best, next_best


@cuda.jit(device=True)
def ties_forgotten(score):
    lane, better = cuda.threadIdx.x, int32(0)
    for i in range(GROUPS // SHARE):
        rival = cuda.shfl_sync(FULL, score, (lane % SHARE + i * SHARE) * SHARE)
        mask = uint32(uint32(0xF) << uint32(lane // SHARE * SHARE))
        better += int32(cuda.popc(uint32(cuda.ballot_sync(FULL, rival > score)) & mask))
    return better


@cuda.jit(device=True)
def votes_of_all_lanes(score):
    lane, better = cuda.threadIdx.x, int32(0)
    for i in range(GROUPS // SHARE):
        rival = lane % SHARE + i * SHARE
        other = cuda.shfl_sync(FULL, score, rival * SHARE)
        is_better = (other > score) | ((other == score) & (rival < lane // SHARE))
        better += int32(cuda.popc(cuda.ballot_sync(FULL, is_better)))
    return better


@cuda.jit(device=True)
def each_lane_all_rivals(score):
    group, better = cuda.threadIdx.x // SHARE, int32(0)
    for i in range(1, GROUPS):
        other = cuda.shfl_xor_sync(FULL, score, SHARE * i)
        better += int32((other > score) | ((other == score) & ((group ^ i) < group)))
    return better


@cuda.jit(device=True)
def ranks_in_shared_memory(score):
    board = cuda.shared.array((4, 32), float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    board[warp, lane] = score
    cuda.shfl_xor_sync(FULL, score, 1)
    cuda.shfl_xor_sync(FULL, score, 2)
    cuda.syncwarp()
    group, better = lane // SHARE, int32(0)
    for rival in range(GROUPS):
        other = board[warp, rival * SHARE]
        better += int32((other > score) | ((other == score) & (rival < group)))
    return better


@cuda.jit(device=True)
def unchanged(bits):
    return int32(bits + 0)


@cuda.jit(device=True)
def negated(bits):
    return int32(-(bits & 0x7FFFFFFF)) if bits < 0 else bits


@cuda.jit(device=True)
def shifted(bits):  # as the package's keys, in which NaN wraps round to the lowest
    return int32((bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 2)


@cuda.jit(device=True)
def with_a_branch(bits):
    if bits < 0:
        return int32(bits ^ 0x7FFFFFFF)
    return bits


@cuda.jit(device=True)
def rank_in_the_warp(bits):
    rank = int32(0)
    for d in range(1, 32):
        rank += int32(cuda.shfl_xor_sync(FULL, bits, d) < bits)
    return rank


@cuda.jit(device=True)
def pops_all_ties(queue):
    highest = redux_sync_max_s32(uint32(FULL), queue[0])
    wins = queue[0] == highest
    holders = uint32(cuda.ballot_sync(FULL, wins))
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    queue[HELD - 1] = NEVER if wins else queue[HELD - 1]
    return highest, holders


@cuda.jit(device=True)
def keeps_the_last_key(queue):
    highest = redux_sync_max_s32(uint32(FULL), queue[0])
    holders = uint32(cuda.ballot_sync(FULL, queue[0] == highest))
    wins = cuda.threadIdx.x == cuda.ffs(holders) - 1
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    return highest, holders


@cuda.jit(device=True)
def maximum_by_shuffles(queue):
    highest = queue[0]
    for d in range(5):
        highest = max(highest, cuda.shfl_xor_sync(FULL, highest, 1 << d))
    holders = uint32(cuda.ballot_sync(FULL, queue[0] == highest))
    wins = cuda.threadIdx.x == cuda.ffs(holders) - 1
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    queue[HELD - 1] = NEVER if wins else queue[HELD - 1]
    return highest, holders


@cuda.jit(device=True)
def one_lane_searches(queue):
    board, found = cuda.shared.array((4, 32), int32), cuda.shared.array((4, 2), int32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    board[warp, lane] = queue[0]
    cuda.syncwarp()
    if lane == 0:
        winner = 0
        for i in range(1, 32):
            winner = i if board[warp, i] > board[warp, winner] else winner
        found[warp, 0], found[warp, 1] = board[warp, winner], winner
    cuda.syncwarp()
    wins = found[warp, 1] == lane
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    queue[HELD - 1] = NEVER if wins else queue[HELD - 1]
    highest = found[warp, 0]
    holders = uint32(cuda.ballot_sync(FULL, board[warp, lane] == highest))
    cuda.syncwarp()
    return highest, holders


@cuda.jit(device=True)
def mask_of_the_winner(queue):
    highest = redux_sync_max_s32(uint32(FULL), queue[0])
    winner = cuda.ffs(cuda.ballot_sync(FULL, queue[0] == highest)) - 1
    wins = cuda.threadIdx.x == winner
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    queue[HELD - 1] = NEVER if wins else queue[HELD - 1]
    return highest, uint32(uint32(1) << uint32(winner))


@cuda.jit(device=True)
def moves_in_a_branch(queue):
    highest = redux_sync_max_s32(uint32(FULL), queue[0])
    holders = uint32(cuda.ballot_sync(FULL, queue[0] == highest))
    if cuda.threadIdx.x == cuda.ffs(holders) - 1:
        for i in range(HELD - 1):
            queue[i] = queue[i + 1]
        queue[HELD - 1] = NEVER
    return highest, holders


@cuda.jit(device=True)
def counts_itself(is_kept):
    lane = cuda.threadIdx.x
    upto = uint32(uint32(0xFFFFFFFF) >> uint32(31 - lane))
    return int32(cuda.popc(uint32(cuda.ballot_sync(FULL, is_kept)) & upto & uint32(0x11111111 << (lane % 4))))


@cuda.jit(device=True)
def of_all_tokens(is_kept):
    lower = uint32((1 << cuda.threadIdx.x) - 1)
    return int32(cuda.popc(uint32(cuda.ballot_sync(FULL, is_kept)) & lower))


@cuda.jit(device=True)
def scan_by_shuffles(is_kept):
    lane, count = cuda.threadIdx.x, int32(is_kept)
    for distance in (4, 8, 16):
        below = cuda.shfl_up_sync(FULL, count, distance)
        count = int32(count + below) if lane >= distance else count
    cuda.ballot_sync(FULL, is_kept)
    return int32(count - int32(is_kept))


CASES = [
    ("LARGEST", None, RIGHT, "with 4 shuffles"),
    ("LARGEST", one_exchange, WRONG, "random values: the largest value is"),
    ("LARGEST", seconds_forgotten, WRONG, "the second largest value is"),
    ("LARGEST", only_the_largest, WRONG, "must return two values: the largest and the second largest"),
    ("LARGEST", each_lane_in_turn, OVER_PAR, "with 8 shuffles; par is 4. After one exchange"),
    ("LARGEST", largest_in_shared_memory, REFUSED, "shared memory"),
    ("RANK", None, RIGHT, "with 2 shuffles"),
    ("RANK", ties_forgotten, WRONG, "few values, so that some are equal: the number of better groups is"),
    ("RANK", votes_of_all_lanes, WRONG, "random values: the number of better groups is"),
    ("RANK", each_lane_all_rivals, OVER_PAR, "with 7 shuffles; par is 2"),
    ("RANK", ranks_in_shared_memory, REFUSED, "shared memory"),
    ("KEY", None, RIGHT, "with 1 executed line;"),
    ("KEY", unchanged, WRONG, "-inf is below"),
    ("KEY", negated, RIGHT, "with 1 executed line;"),
    ("KEY", shifted, WRONG, "maps its key"),
    ("KEY", with_a_branch, OVER_PAR, "with 3 executed lines; par is 1. bits >> 31"),
    ("KEY", rank_in_the_warp, WRONG, "is below"),
    ("POP", None, RIGHT, "with 0 shuffles"),
    ("POP", pops_all_ties, WRONG, "few values, so that some are equal: pop 1 returns the"),
    ("POP", keeps_the_last_key, WRONG, "pop"),
    ("POP", mask_of_the_winner, WRONG, "the lanes that hold the highest key are 0x"),
    ("POP", moves_in_a_branch, REFUSED, "one lane executes a line 8 times alone"),
    ("POP", maximum_by_shuffles, OVER_PAR, "Which instruction"),
    ("POP", one_lane_searches, REFUSED, "shared memory"),
    ("PLACE", None, RIGHT, "with 1 vote;"),
    ("PLACE", counts_itself, WRONG, "the place is"),
    ("PLACE", of_all_tokens, WRONG, "the place is"),
    ("PLACE", scan_by_shuffles, REFUSED, "it uses shuffles; a vote tells all lanes at once (3 shuffles)"),
]


@pytest.mark.parametrize("name, answer, state, words", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_answers_of_the_exercises(name, answer, state, words):
    exercise = getattr(answers, name)
    verdict = exercise.check(answer or exercise.own)
    assert (verdict.state, words in verdict.text) == (state, True), verdict.text
    goes_on = state in (RIGHT, OVER_PAR)
    assert verdict.answer is ((answer or exercise.own) if goes_on else exercise.own)


@pytest.mark.parametrize("name", ["LARGEST", "RANK", "KEY", "POP", "PLACE"])
def test_stubs_are_open(name):
    assert getattr(answers, name).check(...).state == OPEN


def test_repairs_of_the_race(kernels):
    """Only B: the division at the end of the kernel reads weights that C's shuffle does not order."""
    repairs = kernels["repairs"]
    assert page.exercises.race.check(repairs).state == OPEN
    right = page.exercises.race.check(repairs, "B")
    assert right.state == RIGHT and right.text == "right: only B repairs the kernel"
    states = [line[1:] for line in right.table.lines]
    assert states == [["wrong under 4 of 4", "race"], ["wrong under 0 of 4", "no race"], ["wrong under 0 of 4", "race"]]
    assert "C: DataRace" in str(right)
    assert page.exercises.race.check(repairs, "b").state == RIGHT
    for choice in ("A", "C", "BC", "ABC", "FENCE"):
        wrong = page.exercises.race.check(repairs, choice)
        assert wrong.state == WRONG and wrong.text == f"wrong, you chose {choice}: only B repairs the kernel"
    for name, version in repairs.items():
        assert (page.lesson.fault(version) is None) == (name == "B")  # as a step judges it


def test_a_guess_that_is_no_number_is_refused():
    guess = page.exercises.from_l2
    page_l2, page.from_dram_and_l2 = page.from_dram_and_l2, lambda version: ({"L2": 8.5}, 1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "_half_the_bytes", lambda: ())
            assert guess.check(None).state == OPEN
            assert "'8' is no number of microseconds" in guess.check(None, "8").text
            assert guess.check(None, 8).text == "right: you predicted 8 us, and it takes 8.50 us"
            assert guess.check(None, 3).state == WRONG
    finally:
        page.from_dram_and_l2 = page_l2


# The kernels of the page


def definitions(source=None):
    """Return what the page's kernels consist of, with the lesson's own answers, and its versions."""
    tree, found = ast.parse(source or PATH.read_text()), []
    constants = (
        "COMPARE_EXCHANGES",
        "PER_GROUP",
        "PITCH",
        "NUM_KEYS",
        "QUEUE",
        *("narrow", "wide", "racing", "repairs", "last", "halves"),
    )
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.FunctionDef) and node.decorator_list):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in constants:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("exercises."):
            name = ast.unparse(node.targets[0])
            found.append(f"from moe_numba.course.lessons.gate.exercises import {name}")
    return "\n\n\n".join(found) + "\n"


def versions():
    """Return step -> the expression of its version on the page."""
    calls = [node.value for node in ast.parse(PATH.read_text()).body if isinstance(node, ast.Expr)]
    steps = [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "step"]
    return {step.args[0].value: ast.unparse(step.args[1]) for step in steps}


VERSIONS = versions()


@pytest.fixture(scope="module")
def kernels():
    return define(definitions(), {"__name__": "notebook"}, "notebook_01.py")


def inputs(kind, tokens):
    torch.manual_seed(tokens)
    if kind == "few values":
        return torch.randint(0, 2, (tokens, 256)).float(), torch.randint(0, 4, (256,)).float() / 8
    if kind == "all equal":
        return torch.zeros(tokens, 256), torch.zeros(256)
    return torch.randn(tokens, 256) - 6, -2 * torch.rand(256)  # negative scores


def fault(version, logits, bias):
    logits = logits.to(getattr(torch, version[4]))
    return page.fault(*page.run(version, logits, bias, *page.poisoned(len(logits))), logits, bias)


@pytest.mark.parametrize("kind", ["few values", "all equal", "negative"])
@pytest.mark.parametrize("step", [step for step in VERSIONS if step != "one thread per token"])
def test_equal_values_and_incomplete_warps(kernels, step, kind):
    version = eval(VERSIONS[step], kernels)
    for tokens in (1, 13):
        assert fault(version, *inputs(kind, tokens)) is None


LANES = ("cuda.ffs(", ") - 1"), ("31 - cuda.clz(uint32(", "))")  # the lowest lane of a mask, and the highest


@pytest.mark.parametrize(
    "step, right, wrong",
    [
        ("16-byte loads", "other_index < index", "other_index > index"),
        ("one warp per token", "other_index > index", "other_index < index"),
        ("integer keys", *(f"{each}cuda.ballot_sync(FULL, best == highest_key){end}" for each, end in LANES)),
        ("sort once, then pop", *(f"{each}cuda.ballot_sync(FULL, key[0] == highest_key){end}" for each, end in LANES)),
        ("sort once, then pop", " | (key[j] == key[i]) & (slot[j] < slot[i])", ""),
        ("keys alone", "cuda.ffs(skip_taken(matches, picked, holder, column))", "cuda.ffs(matches)"),
        ("four tokens per warp", " | (rival == sum_key) & (group ^ i < group)", ""),
        ("four tokens per warp", "cuda.ffs(skip_taken(matches, picked, holder, column))", "cuda.ffs(matches)"),
        ("four tokens per warp", "    cuda.syncwarp()\n        source", "    source"),
    ],
)
def test_the_check_of_a_step_finds_planted_bugs(step, right, wrong):
    """Wrong rules for ties, which random logits do not show, and a missing barrier."""
    source = definitions()
    assert right in source, right
    changed = define(source.replace(right, wrong), {"__name__": "notebook"}, f"planted_{step}_{len(wrong)}.py")
    assert page.lesson.fault(eval(VERSIONS[step], changed)) is not None


@pytest.mark.parametrize("step", ["dependent launch", "bfloat16 logits"])
def test_a_dependent_launch_that_does_not_wait_is_refused(step):
    source = definitions()
    assert source.count(", griddepcontrol_wait)") == 2
    changed = define(
        source.replace(", griddepcontrol_wait)", ", no_wait)"), {"__name__": "notebook"}, "planted_wait.py"
    )
    found = page.lesson.fault(eval(VERSIONS[step], changed))
    assert "DataRace" in found and "griddepcontrol" in found


def test_the_race_is_found_in_each_order(kernels):
    found = page.lesson.orders(kernels["racing"], seeds=2)
    assert found.wrong == 2 and "store_and_add_as_sglang" in found.race


SIZES = """
import importlib.util, sys
import moe_numba
name = "moe_numba.course.lessons.gate.sizes"
spec = importlib.util.find_spec(name)
source = open(spec.origin).read()
assert source.count("TOPK = 256, 8, 4, 8") == 1
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
exec(compile(source.replace("TOPK = 256, 8, 4, 8", "TOPK = 512, 8, 4, 6"), spec.origin, "exec"), vars(module))
sys.path.insert(0, {folder!r})
import test_gate_prompt as test
kernels = test.define(test.definitions(), {{"__name__": "notebook"}}, "notebook_01.py")
for step, version in test.VERSIONS.items():
    assert test.page.check(eval(version, kernels)) is None, step
for each in ("LARGEST", "RANK", "KEY", "POP", "PLACE"):
    exercise = getattr(test.answers, each)
    assert exercise.check(exercise.own).state == "right", each
assert "no times are recorded" in test.page.result()
print("right")
"""


def test_other_sizes():
    text = SIZES.format(folder=str(Path(__file__).parent))
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("arch", [(7, 5), (9, 0, "a")], ids=str)
def test_no_kernel_spills(arch):
    floats = "float32*", "float32*", "float32*", "int32*", "int32"
    requests = {}
    for step, version in VERSIONS.items():
        bounds = (128, 6 if arch[0] >= 9 else 3) if "ctas_per_sm" in version or version == "last" else None
        signature = ("uint16*", *floats[1:]) if "bfloat16" in version else floats
        requests[step] = (f"{version}[0]", signature, bounds, False)
    codes = compile_apart(definitions(), requests, arch)
    assert {name: code.spilled_bytes for name, code in codes.items()} == dict.fromkeys(requests, 0)
    stacks = {name: code.stack_bytes for name, code in codes.items() if code.stack_bytes}
    assert stacks.keys() == {"one thread per token", "SGLang's design", "16-byte loads"}


# Tables and figures


def test_the_tables_name_all_peers_in_words():
    record = records.read("gate")
    names = {step: page.name_of(step) for step in ("final", *records.peers(record))}
    assert not any(name == step.removeprefix("peer:") for step, name in names.items())
    assert all(name in str(page.peers()) for name in names.values())
    timed = [name for step, name in names.items() if page._recorded(step)]
    assert len(timed) > 3 and all(name in page.result() for name in timed)


def step_of(us, estimate, predicted=None, **rows):
    score = SimpleNamespace(us=estimate, rows={("model", row): number for row, number in rows.items()})
    judged = predicted and us and Judgement(40.0, us, 40.0 - predicted)
    return SimpleNamespace(us=us, score=score, predicted_us=predicted, judgement=judged)


def test_a_prediction_is_said_with_the_errors_of_both_estimates(monkeypatch):
    steps = {"a": step_of(40.0, 50.0), "b": step_of(30.0, 24.0, 20.0), "c": step_of(None, 12.0, 15.0)}
    monkeypatch.setattr(page.lesson, "steps", steps)
    text = page.miss("a", "b").data
    assert "Predicted: 20.0 us; measured: 30.0 us (overestimated)" in text
    assert "The estimate of *a* is 25% above its measured time, that of *b* 20% below." in text
    assert page.miss("b", "c").data == NOT_MEASURED


def test_shares_of_the_slowest_pipe_are_those_of_the_steps(monkeypatch):
    names = "one thread", "SGLang's", "16-byte", "one warp per token", "fast sigmoid", "keys alone"
    steps = {name: step_of(None, 10.0, ALU=4.0 + n, L2=9.5) for n, name in enumerate(names)}
    monkeypatch.setattr(page.lesson, "steps", steps)
    wanted = {"first": "40 to 60 %", "middle": "70 to 80 %", "last": "90 to 90 %"}
    assert page.shares_of_the_slowest_pipe() == wanted


def test_the_page_explains_the_names_of_its_kernels():
    used = set(re.findall(r"\b[A-Z][A-Z_]+\b", definitions()))
    explained = {name for names in page.sizes.MEANINGS for name in names.split(", ")}
    assert used & set(vars(page.sizes)) <= explained
    values = {line[0]: line[1] for line in page.constants().lines}
    assert (values["TOKENS_PER_WARP"], values["FULL"], values["NEVER"]) == ("4", "0xffffffff", "-2147483648")


def test_a_variant_of_what_did_not_pay_is_right():
    for pair in page.variants.versions(page.gate).values():
        for version, options in zip(pair.versions, pair.options, strict=True):
            logits, bias = page.inputs()["random logits"]
            out = page.run(version, logits, bias, *page.poisoned(len(logits)), **options)
            assert page.fault(*out, logits, bias) is None


def figures():
    logits, bias = page.inputs()["random logits"]
    steps = [(f"step {n}", 30.0 - n, 20.0 - n, 31.0 - n if n else None) for n in range(12)]
    return {
        "problem": draw.problem(logits[0], bias),
        "torch": page.torch_kernels(None),
        "lanes": draw.lanes("a thread per token", "a thread per group", "a warp per token"),
        "visits": draw.visits(),
        "ranks": draw.rank_by_counting([0.9, 0.5, 0.9, 0.9, 0.1, 0.2, 0.3, 0.4]),
        "network": draw.network([0.62, 0.91, 0.35, 0.77, 0.58, 0.83, 0.49, 0.70]),
        "four tokens": draw.four_tokens([[7, 0, 2, 3], [1, 2, 5, 6], [0, 1, 4, 5], [3, 4, 6, 7]]),
        "chart": draw.chart(steps),
    }


def test_the_chart_scales_a_row_that_is_cut_off_as_a_whole():
    svg = ElementTree.fromstring(draw.chart([("a", 200, 50, 100), ("b", 20, 5, 10), ("c", 10, 5, 20)])._repr_svg_())
    bars = [each for each in svg.iter() if each.tag.endswith("}rect")]
    first = lambda kind: next(float(bar.get("width")) for bar in bars if kind in bar.get("class"))
    measured, estimate, pipe = map(first, ("blue", "pale", "orange"))
    assert (measured / estimate, pipe / estimate) == (pytest.approx(0.5, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert "scale of its own" in "".join(svg.itertext())


def texts(figure):
    svg = ElementTree.fromstring(figure._repr_svg_())
    return [each for each in svg.iter() if each.tag.endswith("}text")]


def test_texts_of_figures_lie_within_them_and_are_not_small():
    for name, figure in figures().items():
        for each in texts(figure):
            width = 0.5 * float(each.get("font-size")) * len(each.text)
            left = float(each.get("x")) - {"start": 0, "middle": 0.5, "end": 1}[each.get("text-anchor")] * width
            assert 0 <= left and left + width <= draw.WIDTH, (name, each.text)
            assert 8 <= float(each.get("font-size")), (name, each.text)


def test_figures_show_what_the_kernels_compute():
    words = {name: [each.text for each in texts(figure)] for name, figure in figures().items()}
    logits, bias = page.inputs()["random logits"]
    weights, ids = page.reference.biased_grouped_topk(logits[:1], bias, 8, num_expert_group=8, topk_group=4)
    assert {word for word in words["problem"] if word.isdigit()} == {str(expert) for expert in ids[0].tolist()}
    assert words["problem"].count("kept") == words["problem"].count("dropped") == 4
    kept = [re.search("kept|dropped", word)[0] for word in words["ranks"] if re.match(r"\d: ", word)]
    assert kept == ["kept", "kept", "kept", "kept", "dropped", "dropped", "dropped", "dropped"]  # the lower of a tie
    assert [word for word in words["network"] if word.startswith("0.")][8:] == [
        f"{value:.3f}" for value in sorted([0.62, 0.91, 0.35, 0.77, 0.58, 0.83, 0.49, 0.70], reverse=True)
    ]
    lanes = [int(word) for word in words["lanes"] if word.isdigit()]
    assert sorted(lanes) == sorted([*range(32), *range(0, 32, 2)])  # where lanes are narrow, every second number
