"""What the compiler makes of the kernels of "4-bit weights"."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/09_w4_weights.py"
SIGNATURE = [TENSOR_MAP, "uint8*", "uint16*"] + ["int32"] * 4
KERNELS = {  # expression, threads, tensor core instructions for each weight tile
    "decode in the consumer": ("make_gemm(decode_by_value, multiply, 2, 12)", 288, "HGMMA"),
    "shift, mask, multiply": ("make_gemm(decode_by_masks, multiply, 2, 12)", 288, "HGMMA"),
    "four warpgroups": ("make_gemm(decode_by_masks, multiply, 4, 11)", 544, "HGMMA"),
    "mma.sync": ("make_gemm(decode_by_masks, multiply_by_warp, 4, 11)", 544, "HMMA"),
}
CONSTANTS = {"wgmma", "wait", "wait_registers"}


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = []
    for node in ast.parse(NOTEBOOK.read_text()).body:
        names = (
            [name.id for name in ast.walk(node) if isinstance(name, ast.Name)] if isinstance(node, ast.Assign) else []
        )
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or CONSTANTS & {*names}:
            kept.append(node)
    answers = "from moe_numba.course.lessons.w4_weights.answers import decode_word, multiply_by_warp"
    return "\n\n".join([answers, *map(ast.unparse, kept)])


@pytest.fixture(scope="module")
def codes():
    return compile_apart(source(), {name: (text, SIGNATURE, n, True) for name, (text, n, _) in KERNELS.items()})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_spilled_and_the_compiler_complains_of_nothing(name, codes):
    code, (_, threads, instruction) = codes[name], KERNELS[name]
    assert code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL") == 0
    assert code.complaints == [] and code.count("CALL") == 0 and code.count("BRA.U.ANY") == 0
    assert code.count(instruction) in (4, 8) and code.count("STG") == 4
    assert code.registers * (threads + 96) <= 65536


def test_decoding_by_masks_converts_nothing(codes):
    conversions = {name: code.count("F2FP", "F2F", "I2FP") for name, code in codes.items()}
    assert conversions["decode in the consumer"] > 30
    assert all(conversions[name] <= 2 for name in KERNELS if name != "decode in the consumer")  # of the epilogue
