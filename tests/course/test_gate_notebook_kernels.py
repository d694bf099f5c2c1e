"""Kernels of notebook 01: equal values and incomplete warps in the simulator, and machine code for several GPUs."""

import ast
from pathlib import Path

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.draw.player import Player
from moe_numba.course.lessons.gate import draw
from moe_numba.gate.reference import mismatch
from moe_numba.runtime.changed_source import define
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart

TEXT = (Path(__file__).parents[2] / "notebooks" / "01_gate_prompt.py").read_text()
CONSTANTS = "(EXPERTS, GROUPS, KEPT, TOPK)", "(LOWEST, EXCLUDED)", "FULL", "WARPS", "MAX_VPT", "NEVER", "PAIRS", "STEPS"
POINTERS = ("float32*", "float32*", "float32*", "int32*", "int32")
ARRAYS = ("float32[,]", "float32[]", "float32[,]", "int32[,]")
TOKENS_PER_WARP = {  # of the kernels that take pointers
    "make_pointers": 4,
    "make_in_registers": 4,
    "make_wide_loads": 4,
    "make_one_warp_per_token": 1,
    "make_int32": 1,
    "make_rank_groups": 1,
    "make_integer_keys": 1,
    "make_sorted_lanes": 1,
    "make_keys_alone": 1,
    "make_loads_ahead": 1,
    "make_four_tokens": 4,
}


def definitions():
    """Return the notebook's imports, the constants of its kernels, and the functions that are or make kernels."""
    found, lines = [], TEXT.splitlines()
    for node in ast.parse(TEXT).body:
        if isinstance(node, ast.FunctionDef) and (node.decorator_list or node.name == "make_load"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append("\n".join(lines[first - 1 : node.end_lineno]))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()") in [
            c.strip("()") for c in CONSTANTS
        ]:
            found.append(ast.unparse(node))
    return "\n\n".join(found)


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


def route(kernel, logits, bias, tokens_per_warp):
    tokens = len(logits)
    weights, ids = torch.full((tokens, 8), float("nan")), torch.full((tokens, 8), -7, dtype=torch.int32)
    launch(kernel, -(-tokens // (tokens_per_warp * 6)), (32, 6), logits, bias, weights, ids, tokens)
    return mismatch(weights, ids, logits, bias, 8, num_expert_group=8, topk_group=4)


@pytest.mark.skipif(not simulator.ENABLED, reason="runs in the simulator")
@pytest.mark.parametrize("kind", ["few values", "all equal", "negative"])
@pytest.mark.parametrize("make", TOKENS_PER_WARP)
def test_equal_values_and_incomplete_warps(kernels, make, kind):
    for tokens in (1, 13):
        assert route(kernels[make](256, 8, 4, 8), *inputs(kind, tokens), TOKENS_PER_WARP[make]) is None


@pytest.mark.skipif(not simulator.ENABLED, reason="runs in the simulator")
def test_a_kernel_without_the_rule_for_repeated_keys_is_rejected(kernels):
    source = definitions()
    rule = "ffs(drop_taken(matches, picked, holder, column))"
    assert source.count(rule) == 3
    wrong = define(source.replace(rule, "ffs(matches)"), {"__name__": "notebook"}, "wrong_01.py")
    assert route(wrong["make_keys_alone"](256, 8, 4, 8), *inputs("all equal", 2), 1) is not None


@pytest.mark.skipif(not simulator.ENABLED, reason="runs in the simulator")
@pytest.mark.parametrize("kind", ["random", "few values"])
def test_frames_of_picks_show_the_chosen_experts(kernels, kind):
    logits, bias = inputs(kind, 1)
    weights, ids = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    with simulator.trace() as events:
        launch(kernels["make_sorted_lanes"](256, 8, 4, 8), 1, (32, 1), logits, bias, weights, ids, 1)
    picks = draw.picks_of(events)
    scores = (logits[0].sigmoid() + bias)[ids[0]].tolist()
    assert [max(front for front in fronts if front is not None) for fronts, _ in picks] == pytest.approx(scores)
    assert [sum(front is None for front in fronts) for fronts, _ in picks] == [16] * 8  # four groups are dropped
    frames, width, height = draw.pick_frames(picks, 8)
    Player(frames, width, height, "picks")
    for expert, frame in zip(ids[0].tolist(), frames, strict=True):
        (winner,) = [shape for shape in frame.shapes if getattr(shape, "kind", None) == "active"]
        assert winner.group == f"lane {expert // 8}" and f"lane {expert // 8}, which drops" in frame.note


@pytest.mark.parametrize("arch", [(7, 5), (8, 0), (9, 0, "a")], ids=str)
def test_no_kernel_spills(arch):
    shape = "(256, 8, 4, 8)"
    requests = {name: (name + shape, POINTERS, None, False) for name in TOKENS_PER_WARP}
    requests["make_four_tokens"] = ("make_four_tokens" + shape, POINTERS, (192, 4), False)
    requests["make_port_static"] = ("make_port_static" + shape, ARRAYS, None, False)
    requests["one_thread_per_token"] = ("one_thread_per_token", ARRAYS, None, False)
    requests["port_dynamic"] = ("port_dynamic", (*ARRAYS, "int32", "int32", "int32"), None, False)
    codes = compile_apart(definitions(), requests, arch)
    assert {name: code.spilled_bytes for name, code in codes.items()} == dict.fromkeys(requests, 0)
    stacks = {name: code.stack_bytes for name, code in codes.items() if code.stack_bytes}
    assert stacks.keys() == {
        "one_thread_per_token",
        "port_dynamic",
        "make_port_static",
        "make_pointers",
        "make_wide_loads",
    }
