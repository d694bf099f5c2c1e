"""The lesson "Shared experts": steps are right, its checks find wrong layers and kernels, exercises judge answers."""

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.bench import Stats, records
from moe_numba.course.lessons.shared_experts import answers, draw, exercises, layers, runs
from moe_numba.course.lessons.shared_experts.routing import routing, with_column
from moe_numba.course.lessons.shared_experts.sizes import ALL_TOKENS, DTYPES, EXPERTS, GATE_EXPERTS, GATE_TOPK
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.runtime.changed_source import define

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/05_shared_experts.py"


# Answers: append a column


def appending(column):
    """Return a kernel that appends a column as the passage says."""
    source = f"""
from numba import cuda, float32, int32, uint32

@cuda.jit
def answer(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = int32(cuda.grid(1))
    token = int32(uint32(i) // uint32(topk + 1))
    column = int32(i - token * (topk + 1))
    if token < tokens:
        weight, expert = shared_weight, int32(num_experts + token % replicas)
        if column < topk:
            weight, expert = topk_weights[token * topk + column], topk_ids[token * topk + column]
        {column}
        weights[i] = weight
        ids[i] = expert
"""
    return define(source, {"__name__": "answer"}, f"appending_{next(_numbers)}.py")["answer"]


_numbers = itertools.count()
PADDING = "elif topk_ids[token * topk] < 0:\n            weight, expert = float32(0), int32(-1)"


@cuda.jit
def a_branch_for_each_kind(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = int32(cuda.grid(1))
    token, column = int32(uint32(i) // uint32(topk + 1)), int32(uint32(i) % uint32(topk + 1))
    if token < tokens:
        if column < topk:
            weights[i] = topk_weights[token * topk + column]
            ids[i] = topk_ids[token * topk + column]
        else:
            padding = topk_ids[token * topk] < 0
            weights[i] = float32(0) if padding else shared_weight
            ids[i] = int32(-1) if padding else int32(num_experts + token % replicas)


@cuda.jit
def three_branches(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    if i < tokens * (topk + 1):
        token, column = i // (topk + 1), i % (topk + 1)
        if column < topk:
            weights[i] = topk_weights[token * topk + column]
            ids[i] = topk_ids[token * topk + column]
        elif topk_ids[token * topk] < 0:
            weights[i] = 0.0
            ids[i] = -1
        else:
            weights[i] = shared_weight
            ids[i] = num_experts + token % replicas


@cuda.jit
def a_thread_for_each_token(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    token = int32(cuda.grid(1))
    if token < tokens:
        for k in range(topk):
            weights[token * (topk + 1) + k] = topk_weights[token * topk + k]
            ids[token * (topk + 1) + k] = topk_ids[token * topk + k]
        padding = topk_ids[token * topk] < 0
        weights[token * (topk + 1) + topk] = float32(0) if padding else shared_weight
        ids[token * (topk + 1) + topk] = int32(-1) if padding else int32(num_experts + token % replicas)


@cuda.jit
def one_thread(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    if cuda.grid(1) == 0:
        for token in range(tokens):
            for k in range(topk):
                weights[token * (topk + 1) + k] = topk_weights[token * topk + k]
                ids[token * (topk + 1) + k] = topk_ids[token * topk + k]
            padding = topk_ids[token * topk] < 0
            weights[token * (topk + 1) + topk] = float32(0) if padding else shared_weight
            ids[token * (topk + 1) + topk] = int32(-1) if padding else int32(num_experts + token % replicas)


@cuda.jit
def one_warp(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = int32(cuda.grid(1))
    while i < 32 * ((tokens * (topk + 1) + 31) // 32) and cuda.grid(1) < 32:
        token, column = int32(uint32(i) // uint32(topk + 1)), int32(uint32(i) % uint32(topk + 1))
        if token < tokens:
            weight, expert = shared_weight, int32(num_experts + token % replicas)
            if column < topk:
                weight, expert = topk_weights[token * topk + column], topk_ids[token * topk + column]
            elif topk_ids[token * topk] < 0:
                weight, expert = float32(0), int32(-1)
            weights[i] = weight
            ids[i] = expert
        i += 32


APPEND, STORE = exercises.append_column, exercises.store_nine


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (answers.append_column, RIGHT, "with 144 sectors stored; par is 144"),
        (appending(PADDING), RIGHT, "144 sectors"),
        (appending("pass"), WRONG, r"ids\[0, 8\] is 256, not -1"),
        (appending("elif topk_ids[token * topk] < 0:\n            expert = int32(-1)"), WRONG, r"weights\[0, 8\]"),
        (
            appending(
                "elif topk_weights[token * topk] == float32(0):\n            weight, expert = float32(0), int32(-1)"
            ),
            WRONG,
            r"ids\[2, 8\] is -1, not 258",
        ),
        (
            appending(PADDING.replace("topk_ids[token * topk]", "ids[token * (topk + 1)]")),
            WRONG,
            "race|nothing has written",
        ),
        (appending(PADDING.replace("token * topk]", "token * topk + topk - 1]")), WRONG, r"ids\[3, 8\] is -1, not 259"),
        (appending(PADDING.replace("token * topk]", "token * topk + column]")), WRONG, "out of bounds|ids"),
        (
            appending(PADDING + "\n        expert = int32(expert + 0 * i); topk_weights[0] = float32(7)"),
            WRONG,
            "race|topk_weights",
        ),
        (a_branch_for_each_kind, OVER_PAR, "272 sectors stored; par is 144. Does a warp store 32 adjacent"),
        (three_branches, OVER_PAR, "sectors stored; par is 144. Does a warp"),
        (a_thread_for_each_token, REFUSED, "stores the elements of others"),
        (one_thread, REFUSED, "one lane executes a line|stores the elements of others"),
        (one_warp, REFUSED, "stores the elements of others"),
    ],
)
def test_answers_that_append(answer, state, text):
    check(APPEND, answer, state, text)


def check(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


# Answers: the hole of the gate


@cuda.jit(device=True)
def stores_the_ninth_apart(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK:
        weights[token * (GATE_TOPK + 1) + lane] = weight
        ids[token * (GATE_TOPK + 1) + lane] = expert
    if lane == 0:
        weights[token * (GATE_TOPK + 1) + GATE_TOPK] = float32(1)
        ids[token * (GATE_TOPK + 1) + GATE_TOPK] = int32(GATE_EXPERTS)


@cuda.jit(device=True)
def rows_of_eight(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK + 1:
        weights[token * GATE_TOPK + lane] = weight if lane < GATE_TOPK else float32(1)
        ids[token * GATE_TOPK + lane] = expert if lane < GATE_TOPK else int32(GATE_EXPERTS)


@cuda.jit(device=True)
def stores_what_the_lane_has(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK + 1:
        weights[token * (GATE_TOPK + 1) + lane] = weight
        ids[token * (GATE_TOPK + 1) + lane] = expert


@cuda.jit(device=True)
def all_lanes_store(weights, ids, token, lane, weight, expert):
    weights[token * (GATE_TOPK + 1) + lane] = weight if lane < GATE_TOPK else float32(1)
    ids[token * (GATE_TOPK + 1) + lane] = expert if lane < GATE_TOPK else int32(GATE_EXPERTS)


@cuda.jit(device=True)
def lane_zero_stores_all(weights, ids, token, lane, weight, expert):
    for k in range(GATE_TOPK + 1):
        w, e = cuda.shfl_sync(0xFFFFFFFF, weight, k), cuda.shfl_sync(0xFFFFFFFF, expert, k)
        if lane == 0:
            weights[token * (GATE_TOPK + 1) + k] = w if k < GATE_TOPK else float32(1)
            ids[token * (GATE_TOPK + 1) + k] = e if k < GATE_TOPK else int32(GATE_EXPERTS)


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (answers.store_nine, RIGHT, "with 2 store instructions"),
        (stores_the_ninth_apart, OVER_PAR, "Which lane is idle"),
        (rows_of_eight, WRONG, "race|ids"),
        (stores_what_the_lane_has, WRONG, r"ids\[0, 8\] is -5, not 256"),
        (all_lanes_store, WRONG, "race|out of bounds"),
        (lane_zero_stores_all, REFUSED, "one lane executes a line 9 times alone"),
    ],
)
def test_answers_that_store(answer, state, text):
    check(STORE, answer, state, text)


@pytest.mark.parametrize("exercise", [APPEND, STORE])
def test_stubs_are_open(exercise):
    @cuda.jit(device=exercise is STORE)
    def stub(*arguments):
        pass  # yours

    assert exercise.check(stub).state == exercise.check().state == OPEN


# Answers in Python, and guesses


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (..., OPEN, "not answered yet"),
        (lambda weights, s, renormalize, scaled: ..., OPEN, "not answered yet"),
        (answers.nine_weights, RIGHT, "right"),
        (
            lambda w, s, r, c: torch.cat([w, torch.ones_like(w[:, :1])], 1),
            WRONG,
            r"renormalize = True.*\[0, 0\]|\[0, 8\]",
        ),
        (lambda w, s, r, c: answers.nine_weights(w, 1.0, r, c), WRONG, r"\[0, 8\] is 1, not 0.4"),
        (lambda w, s, r, c: answers.nine_weights(w, s, r, False), WRONG, "scaled = True"),
        (lambda w, s, r, c: answers.nine_weights(w.div_(2), s, r, c), WRONG, "changes its argument weights"),
        (lambda w, s, r, c: None, WRONG, "shape"),
    ],
)
def test_ninth_weights(answer, state, text):
    verdict = exercises.ninth_weight.check(answer)
    assert verdict.state == state and re.search(text, verdict.text, re.S), verdict.text


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (lambda counts, tile_rows, across, sms: ..., OPEN, "not answered yet"),
        (answers.rounds, RIGHT, "right"),
        (lambda c, t, a, s: (-(-(-(-sum(c) // t) * a) // s), 7), WRONG, r"not \(4, 8\)"),
        (
            lambda c, t, a, s: (answers.rounds(c, t, a, s)[0], max(-(-r // t) for r in c)),
            WRONG,
            r"\(4, 1\), not \(4, 4\)",
        ),
        (lambda c, t, a, s: answers.rounds(c, t, a, s)[0], WRONG, r"is 4, not \(4, 8\)"),
    ],
)
def test_rounds(answer, state, text):
    verdict = exercises.rounds.check(answer)
    assert verdict.state == state and re.search(text, verdict.text, re.S), verdict.text


def test_what_is_used_after_a_python_exercise(capsys):
    own = exercises.rounds.solution
    assert exercises.rounds.use(lambda *load: ...) is own
    assert exercises.rounds.use(answers.rounds) is answers.rounds


def test_guesses_of_experts_are_judged():
    judge = exercises.experts_read.check
    assert judge().state == judge(replicas_4=...).state == OPEN and "3" not in judge(replicas_4=...).text
    right = judge(ninth_column_64=0, replicas_64=7, replicas_4=3)
    assert right.state == RIGHT and "is read either way" in right.text
    assert judge(replicas_4=7).state == WRONG and "it is 3" in judge(replicas_4=7).text
    assert judge(replicas_5=7).state == WRONG


def test_the_numbers_appear_after_a_diagnosis():
    judge = exercises.what_saves.check
    assert judge().state == OPEN and "launches" not in judge().text.partition("C:")[0] and "->" not in judge().text
    assert judge("E").state == judge("A").state == WRONG
    assert judge("C").state == RIGHT and re.search(r"bytes ([\d,]+) -> \1; operations ([\d,]+) -> \2;", judge("C").text)


# The page's layers and kernels, and changes that the checks must find


USED = {
    "nine_weights": "nine_weights",
    "append_column": "append_column",
    "rounds": "rounds",
    "store_nine": "store_nine",
}


def page(right="", wrong="", module=None):
    """Return what the page's cells define, with a passage replaced, and its steps: (kind, name) -> Python."""
    source = NOTEBOOK.read_text()
    assert not right or source.count(right) == 1, right
    tree, steps = ast.parse(source.replace(right, wrong) if right else source), {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            kind = ast.unparse(node.value.func)
            if kind in ("step", "routing.step"):
                steps[kind, node.value.args[0].value] = ast.unparse(node.value.args[1])
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    file = f"shared_experts_page_{next(_numbers)}"
    names = {"__name__": module or file} | {name: getattr(answers, name) for name in USED}
    return define("\n\n".join(map(ast.unparse, kept)), names, f"{file}.py"), steps


@pytest.fixture(scope="module")
def right_page():
    return page()


STEPS = "separate", "column in torch", "column in a kernel", "8 replicas", "column in the gate"
KERNEL_STEPS = "gate, then append", "gate with nine columns"


def test_the_page_has_these_steps(right_page):
    _, steps = right_page
    assert tuple(name for kind, name in steps if kind == "step") == STEPS
    assert tuple(name for kind, name in steps if kind == "routing.step") == KERNEL_STEPS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_layers_are_right(name, dtype, right_page):
    names, steps = right_page
    assert layers.wrong(eval(steps["step", name], names), dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_right_if_all_tokens_are_alike(dtype, right_page):
    names, _ = right_page
    for name in ("separate", "ninth_in_gate", "replicas_by_kernel"):
        assert layers.wrong(names[name], dtype, 7, alike=True) is None
        assert layers.wrong(names[name], dtype, 1) is None


@pytest.mark.parametrize("name", KERNEL_STEPS)
def test_kernels_are_right(name, right_page):
    names, steps = right_page
    assert routing.fault(eval(steps["routing.step", name], names)) is None


@pytest.mark.parametrize(
    "kind, name, right, wrong",
    [
        ("step", "separate", "EXPERTS, shared_expert(layer, x))", "EXPERTS)"),
        ("step", "separate", "layer.experts(EXPERTS, EXPERTS + 1)", "layer.experts(0, 1)"),
        ("step", "column in torch", "torch.ones_like(weights[:, :1])", "torch.ones_like(weights[:, :1]) / SCALE"),
        ("step", "column in torch", "full_like(ids[:, :1], EXPERTS)", "full_like(ids[:, :1], EXPERTS - 1)"),
        ("step", "8 replicas", "*layer.route(x), EXPERTS, REPLICAS)", "*layer.route(x), EXPERTS - 1, REPLICAS)"),
        ("step", "column in the gate", "ids = layer.route(x, 1)", "ids = layer.route(x)"),
        ("routing.step", "gate, then append", "row + first, valid", "first, valid"),
        ("routing.step", "gate, then append", "weights[token * GATE_TOPK + lane] = weight", "pass"),
        ("routing.step", "gate, then append", "float32(0), float32(SCALE))", "float32(0), float32(1))"),
        ("routing.step", "gate, then append", "(cuda.threadIdx.x >> 5))", "(cuda.threadIdx.x >> 6))"),
    ],
)
def test_the_checks_find_wrong_steps(kind, name, right, wrong):
    names, steps = page(right, wrong)
    version = eval(steps[kind, name], names)
    if kind == "step":
        assert layers.wrong(version, "bfloat16") is not None
        with pytest.raises(WrongResult, match=name):
            layers.Layers().step(name, version)
    else:
        assert routing.fault(version) is not None


def test_a_shared_expert_that_one_token_lacks_is_found():
    def forgets_one(layer, x):
        weights, ids = layer.route(x, 1)
        weights[len(x) // 2, -1] = 0
        w13, w2, *scales = layer.experts(0, EXPERTS + 1)
        from moe_numba import fused_experts

        return fused_experts(x, w13, w2, weights, ids, *scales)

    assert "token 3 is off" in layers.wrong(forgets_one, "FP8")


def test_launches_are_counted(right_page):
    names, _ = right_page
    x = layers.batch("bfloat16", 6)[0]
    layer = layers.layers("bfloat16")[0]
    count = lambda name: layers.launches(lambda: names[name](layer, x))
    found = {name: count(name) for name in ("separate", "ninth_in_torch", "ninth_in_gate")}
    assert found == {"separate": 8, "ninth_in_torch": 10, "ninth_in_gate": 6}
    assert layers.launches(lambda: x.view(-1)[None].expand(3, -1)) == 0  # views
    assert layers.launches(lambda: torch.empty_like(x).add_(1)) == 1


def test_layers_have_equal_replicas_and_sizes_can_change():
    shape = layers.Shape(12, 3, 256, 128, 3, 2)
    for dtype in DTYPES.values():
        layer = layers.Layer(shape, dtype, replicas=5)
        assert torch.equal(layer.w13[12].float(), layer.w13[16].float()) and len(layer.w2) == 17
        x = layer.tokens(4)
        weights, ids = with_column(answers.append_column, *layer.route(x), 12, 5)
        w13, w2, *scales = layer.experts(0, 17)
        from moe_numba import fused_experts

        out = fused_experts(x, w13, w2, weights, ids, *scales)
        assert layers.mismatch(out, layer.expected(x), dtype) is None
        assert layer.clone().w13.data_ptr() != layer.w13.data_ptr()


# Times: measured on a GPU, recorded elsewhere


@pytest.fixture
def cells(monkeypatch):
    """Return a function that makes the page's cells the main module, with a passage replaced."""

    def run(right="", wrong=""):
        names, _ = page(right, wrong, "__main__")
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**names))
        return names

    return run


@pytest.fixture
def measured(monkeypatch):
    """Time as on a GPU, each function in the microseconds of its name."""
    us = {"separate": 100.0, "column in torch": 110.0}
    monkeypatch.setattr(
        layers, "kernel_times", lambda calls, **_: {n: Stats(us[n], us[n] - 1, us[n] + 1) for n in calls}
    )
    monkeypatch.setattr(layers, "simulator", SimpleNamespace(ENABLED=False))
    monkeypatch.setattr(layers, "launches", lambda call: 7)
    monkeypatch.setattr(layers, "wrong", lambda *_: None)  # other tests compute the layers


def test_steps_are_timed_and_recorded(cells, measured, monkeypatch):
    names, found = cells(), layers.Layers()
    found.step("separate", names["separate"])
    step = found.step("column in torch", names["ninth_in_torch"], predicted_us=108.0)
    assert step.us == {"FP8": 110.0, "bfloat16": 110.0} and step.compared == (100.0, 110.0)
    assert "100 → 110" in str(step) and "7 → 7" in step._repr_html_() and step.sentence().startswith("FP8: ")
    assert found.times("sizes", {"separate": names["separate"]}, "FP8", 9) == {"separate": 100.0}
    assert len(found.summary().lines) == 2
    rows = list(found.rows.values())
    assert [row["step"] for row in rows] == ["separate"] * 2 + ["column in torch"] * 2 + ["sizes: separate"]
    assert all(row["kernel_us"]["median"] in (100.0, 110.0) and len(row["forward"]) == 16 for row in rows)

    # Without a GPU the same code has the recorded times, and changed code has none.
    monkeypatch.setattr(layers, "simulator", simulator)
    for row in rows:
        row["config"] = layers._about("FP8", 8, False)["config"]
    monkeypatch.setattr(records, "recorded", lambda topic, gpu: {"rows": rows})
    read = layers.Layers()
    assert read.step("separate", names["separate"]).us == {"FP8": 100.0, "bfloat16": 100.0}
    again = read.step("column in torch", names["ninth_in_torch"], predicted_us=108.0)
    assert again.compared == (100.0, 110.0) and again.judgement.saved_us == -10
    assert read.times("sizes", {"separate": names["separate"]}, "FP8", 9) == {"separate": 100.0}
    names = cells("x, x_scale = per_token_cast_to_fp8(x)", "x, x_scale = per_token_cast_to_fp8(1 * x)")
    assert read.step("separate", names["separate"]).us == {}
    assert read.step("column in torch", names["ninth_in_torch"]).us == {"FP8": 110.0, "bfloat16": 110.0}


def test_a_comment_does_not_change_the_code(cells):
    code = lambda *change: layers.code_of(cells(*change)["separate"])
    assert code() == code("# a grouped GEMM with one group is a GEMM", "# one group")
    assert code() != code("ends = layer.ends(len(x))", "ends = layer.ends(len(x) - 1)")
    assert layers.code_of(runs.small_operation) == layers.code_of(runs.small_operation)


def test_predictions_need_times():
    assert runs.by_torch("separate", {}, 4) is None
    assert runs.launch_us() > 0


def test_predictions(monkeypatch):
    steps = {name: SimpleNamespace(us={"FP8": us}) for name, us in (("separate", 100.0), ("column in torch", 104.0))}
    monkeypatch.setattr(runs.layers, "steps", steps)
    parts = {"the shared expert": 12.0, "a small operation": 1.5, "reading an expert's weights": 2.0}
    assert runs.by_torch("separate", parts, 4) == 100 + 2 - 12 + 4 * 1.5
    assert runs.fewer_operations("column in torch", parts, 3) == 104 - 4.5
    assert runs.fewer_operations("column in torch", {}, 3) is None
    assert runs.more_experts("separate", 7) == pytest.approx(100 + runs.weights_us(7))
    assert runs.without_launch("separate") == 100 - runs.launch_us()


# Tables and figures


def test_the_lower_bound_counts_experts():
    lines = runs.show_lower_bound().lines
    read = [int(line[1]) for line in lines]
    assert [line[0].replace(",", "") for line in lines] == [str(tokens) for tokens in ALL_TOKENS]
    assert read[0] == 9 and read == sorted(read) and read[-1] <= 257
    assert runs.lower_bound_us(1, "bfloat16", 9) == 2 * runs.lower_bound_us(1, "FP8", 9)
    assert runs.lower_bound_us(1 << 20, "FP8", 257) > runs.weights_us(257)  # computing takes longer


def test_the_table_of_ninth_weights_rejects_wrong_ones():
    verdicts = {name: verdict for name, _, verdict in runs.show_ninth_weight(answers.nine_weights).lines}
    right = [name for name, verdict in verdicts.items() if verdict == "right"]
    assert right == ["nine_weights", "nine_weights, one of 8 replicas for each token"] and len(verdicts) == 5


def test_rounds_of_one_shared_expert_and_of_replicas():
    lines = runs.show_rounds(answers.rounds).lines
    assert lines[0][4] == lines[1][4] and int(lines[0][5]) > int(lines[1][5])  # single tiles, whole columns


def test_all_sizes_and_what_they_explain(right_page):
    names, _ = right_page
    table = runs.show_sizes(names["separate"], names["ninth_in_gate"], names["replicas_by_kernel"])
    assert len(table.lines) == 2 * (len(ALL_TOKENS) + 1) and all(
        line[2] for line in table.lines if "alike" not in line[0]
    )
    assert [line[1] for line in runs.show_explained().lines] == ["TTFT", "ITL"] * 3
    assert all(float(line[3].split()[0]) > 0 for line in runs.show_explained().lines)
    assert all("not timed" not in line for line in runs.show_what_did_not_pay().lines)


def test_figures_have_a_box_for_each_element():
    boxes = lambda figure: [re.search("drawing-(\\w+)", part)[1] for part in figure.parts if part.startswith("<rect")]
    found, legend = boxes(draw.appended()), 4
    assert len(found) == 4 * 9 + legend and found.count("orange") == 3 + 1 and found.count("sky") == 3 + 1
    found = boxes(draw.lanes())
    assert len(found) == 32 + 9 + 3 and found.count("orange") == 1 + 1 + 1


# The page on weights


def test_the_page_on_weights_shows_what_its_program_prints():
    program = ROOT / "docs/examples/shared_expert_weights.py"
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    printed = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    text = (ROOT / "docs/shared_expert_weights.md").read_text()
    assert f"```text\n{printed}```" in text
