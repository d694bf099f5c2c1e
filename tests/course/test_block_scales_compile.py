"""What the compiler makes of the kernels of "Block scales"."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/08_block_scales.py"
SIGNATURE = [TENSOR_MAP] * 2 + ["float32*"] * 2 + ["int32*"] + ["int32"] * 5
KERNELS = {  # expression, stores to global memory
    "no scales": ("make_gemm(write_nothing, read_one, make_add(128), 128, 6)", 32),
    "scale per column": ("make_gemm(write_by_column, read_by_column, promote_by_column, 128, 6)", 32),
    "scale per row": ("make_gemm(make_write_by_row(128), read_by_row, make_fma_blocks(128, 64), 128, 6)", 32),
    "192 columns": ("make_gemm(make_write_by_row(192), read_three, promote_192, 192, 5)", 48),
    "factors by producers": ("make_gemm(write_factors, read_factors, promote_192, 192, 5)", 48),
    "barrier tested early": ("make_gemm(write_factors, read_factors, promote_192, 192, 5, True)", 48),
}
TOO_WIDE = "make_gemm(write_nothing, read_one, make_add(256), 256, 4)"
MOST_COMPARES = 70  # a search of accumulators has hundreds
CONSTANTS = {"COLUMN_PITCH", "ROW_SCALE", "load_32", "NONE"}


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = []
    for node in ast.parse(NOTEBOOK.read_text()).body:
        names = (
            {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if isinstance(node, ast.Assign)
            else set()
        )
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or names & CONSTANTS:
            kept.append(node)
    answers = "from moe_numba.course.lessons.block_scales.answers import promote_192, read_by_row, write_factors"
    return "\n\n".join([answers, *map(ast.unparse, kept)])


@pytest.fixture(scope="module")
def codes():
    requests = {name: (text, SIGNATURE, 384, True) for name, (text, _) in KERNELS.items()}
    return compile_apart(source(), requests | {"too wide": (TOO_WIDE, SIGNATURE, 384, True)})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_spilled_and_stores_are_unrolled(name, codes):
    code = codes[name]
    assert code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL") == 0
    assert code.count("STG") == KERNELS[name][1] and code.count("ISETP") <= MOST_COMPARES
    assert code.registers == 168 and code.setmaxnreg == [224, 56]


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_complains_of_nothing(name, codes):
    code = codes[name]
    assert code.complaints == [] and code.count("CALL") == 0 and code.count("BRA.U.ANY") == 0
    assert code.count("QGMMA") == 4


def test_a_tile_of_256_columns_is_spilled(codes):
    assert codes["too wide"].spilled_bytes > 0
