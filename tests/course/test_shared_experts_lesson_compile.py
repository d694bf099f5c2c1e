"""What the compiler makes of the kernels of "Shared experts"."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/05_shared_experts.py"
ROUTING = ["float32*", "int32*"]
GATE = (["float32*", "float32*", *ROUTING, "int32"], 128)
APPEND = ([*ROUTING, *ROUTING, *["int32"] * 4, "float32"], 128)
KERNELS = {  # expression, signature and threads
    "append": ("append_column", *APPEND),
    "gate": ("make_gate(store_eight)", *GATE),
    "gate with nine columns": ("make_gate(store_nine)", *GATE),
}


def source(text=""):
    """Return the imports and functions of the page, the lesson's answers, and further functions."""
    tree = ast.parse(NOTEBOOK.read_text())
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    answers = "from moe_numba.course.lessons.shared_experts.answers import append_column, store_nine"
    return "\n\n".join([*map(ast.unparse, kept), answers, text])


STORES_APART = """
@cuda.jit(device=True)
def stores_apart(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK:
        weights[token * (GATE_TOPK + 1) + lane] = weight
        ids[token * (GATE_TOPK + 1) + lane] = expert
    if lane == 0:
        weights[token * (GATE_TOPK + 1) + GATE_TOPK] = float32(1)
        ids[token * (GATE_TOPK + 1) + GATE_TOPK] = int32(GATE_EXPERTS)


@cuda.jit
def append_64(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    token, column = i // (topk + 1), i % (topk + 1)
    if token < tokens and column == topk:
        ids[i] = num_experts + token % replicas
"""


@pytest.fixture(scope="module")
def codes():
    requests = {name: (*request, True) for name, request in KERNELS.items()}
    requests |= {"apart": ("make_gate(stores_apart)", *GATE, True), "64 bits": ("append_64", *APPEND, True)}
    return compile_apart(source(STORES_APART), requests)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_in_local_memory_and_two_instructions_store(name, codes):
    code = codes[name]
    assert code.complaints == [] and code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL", "CALL") == 0
    assert code.count("STG") == 2 and code.registers <= (32 if name == "append" else 64)


def test_the_ninth_column_costs_no_register_and_no_store(codes):
    gate, nine = codes["gate"], codes["gate with nine columns"]
    assert nine.registers <= gate.registers + 2 and abs(len(nine.opcodes) - len(gate.opcodes)) < 16


def test_stores_apart_and_64_bit_divisions_are_found(codes):
    assert codes["apart"].count("STG") == 4
    assert codes["64 bits"].count("CALL") > 0
