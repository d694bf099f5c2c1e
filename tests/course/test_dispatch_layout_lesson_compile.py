"""What the compiler makes of the kernels of the lesson "Dispatch layout"."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/10_dispatch_layout.py"
SIGNATURE = "int64*", "int32*", "uint8*", "int32"
PORT = *SIGNATURE, *["int32"] * 3
COUNT, PER_WARP = "make_count({0}, {1}({0}))", "make_add_for_each_warp"
SHARED = COUNT.format("add_shared", PER_WARP)
RANKS = "make_private(no_experts, make_count_ranks({}))"
KERNELS = {  # expression, signature, threads
    "global atomics": (f"make_global({COUNT.format('add_global', 'make_add_for_each_token')})", SIGNATURE, 256),
    "a ballot for each rank": (f"make_global({COUNT.format('add_global', PER_WARP)})", SIGNATURE, 256),
    "shared atomics": (f"make_layout(start_nothing, {SHARED}, add_to_global)", SIGNATURE, 256),
    "private counters": ("make_private(count_experts, make_count_ranks())", PORT, 256),
    "one cluster": (f"make_layout(start_cluster, {SHARED}, sum_in_cluster)", SIGNATURE, 1024),
    "a group of lanes": ("make_layout(start_cluster, count_in_groups, sum_in_cluster)", SIGNATURE, 1024),
    "four tokens at once": ("make_layout(start_cluster, count_four, sum_in_cluster)", SIGNATURE, 1024),
    "start early": ("make_layout(start_cluster, count_four, sum_in_cluster, True)", SIGNATURE, 1024),
    "A": (RANKS.format("True"), PORT, 256),
    "B": (RANKS.format("False, True"), PORT, 256),
    "C": (RANKS.format("False, False, True"), PORT, 256),
    "D": (RANKS.format("False, False, False, True"), PORT, 256),
    "all four": (RANKS.format("True, True, True, True"), PORT, 256),
}


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = [
        node
        for node in ast.parse(NOTEBOOK.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
    ]
    names = "count_in_groups, or_in_group, sum_in_cluster, tokens_of_rank"
    answers = f"from moe_numba.course.lessons.dispatch_layout.answers import {names}"
    return "\n\n".join([answers, *map(ast.unparse, kept)])


@pytest.fixture(scope="module")
def codes():
    return compile_apart(source(), {name: (*request, True) for name, request in KERNELS.items()})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_lies_in_local_memory_and_no_function_is_called(name, codes):
    code = codes[name]
    assert code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL") == 0
    assert code.complaints == [] and code.count("CALL") == 0 and code.registers <= 65536 // KERNELS[name][2]


def test_where_the_counters_are(codes):
    atomics = {name: (codes[name].count("REDG", "ATOMG"), codes[name].count("ATOMS")) for name in KERNELS}
    assert atomics["private counters"] == (0, 0)
    assert atomics["global atomics"][0] > atomics["a ballot for each rank"][0] > 0 == atomics["global atomics"][1]
    assert min(atomics["shared atomics"]) > 0
    for name in ("one cluster", "a group of lanes", "four tokens at once", "start early"):
        assert atomics[name][0] == 0 < atomics[name][1]


def test_the_compiler_votes_for_additions_to_the_same_counter(codes):
    """The page says so of its first step, whose source has no vote."""
    assert codes["global atomics"].count("VOTEU", "VOTE") == 8


def test_loads_of_ids(codes):
    loads = {name: codes[name].count("LDG") for name in KERNELS}
    assert loads["a group of lanes"] == 1 and loads["four tokens at once"] == 4
    opcodes = [code.split(".")[0] for code in codes["four tokens at once"].opcodes]
    last = max(i for i, opcode in enumerate(opcodes) if opcode == "LDG")  # before the first id is used
    assert not {"SHFL", "ATOMS"} & set(opcodes[:last])


def test_the_mask_and_the_constant_save_instructions(codes):
    length = {name: len(codes[name].opcodes) for name in "ABCD"}
    assert max(length["A"], length["B"]) < min(length["C"], length["D"])
    assert codes["A"].count("ISETP") < codes["C"].count("ISETP") / 2  # which compares a rank with all indices
