"""What the compiler makes of the kernels of the lesson on one kernel, at the sizes that are timed."""

import ast
from pathlib import Path

import pytest

from moe_numba.course.lessons.one_kernel.tile import THREADS
from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/16_one_kernel.py"
COMMON = ("int32*", "uint64*", "int32*", "int32")
TYPES = (*COMMON, "int32", *["int32*"] * 10)
SIZES = "timed_sizes(8)"
EXPERT = "rows_of_expert, wait_for_expert"
KERNELS = {  # expression, signature, threads
    "exchange": (f"make_exchange(place_of)({SIZES})", (*COMMON, *["int32*"] * 5), 32),
    "one launch": (f"make_kernel(rows_of_all, first_gemm_of_all, place_in_y)({SIZES})", TYPES, THREADS),
    "tiles of an expert": (f"make_kernel({EXPERT}, place_in_y)({SIZES})", TYPES, THREADS),
    "rows go home": (f"make_kernel({EXPERT}, place_at_home)({SIZES})", TYPES, THREADS),
    "the leader counts": (f"make_kernel({EXPERT}, place_at_home, at_the_change)({SIZES})", TYPES, THREADS),
}


@pytest.fixture(scope="module")
def codes():
    kept = [
        node
        for node in ast.parse(NOTEBOOK.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
    ]
    own = "from moe_numba.course.lessons.one_kernel.answers import place_of, wait_for_expert"
    sizes = "from moe_numba.course.lessons.one_kernel.runs import timed_sizes"
    source = "\n\n".join([*map(ast.unparse, kept), own, sizes])
    return compile_apart(source, {name: (text, types, n, False) for name, (text, types, n) in KERNELS.items()})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_and_a_cta_fits(name, codes):
    code = codes[name]
    assert code.spilled_bytes == code.stack_bytes == 0 and not code.complaints
    assert code.registers * KERNELS[name][2] <= 65536


@pytest.mark.parametrize("name", KERNELS)
def test_tiles_are_counted_behind_a_fence_and_multiplied_by_tensor_cores(name, codes):
    is_exchange = name == "exchange"
    for opcode in ("MEMBAR.ALL.GPU", "HMMA"):
        assert codes[name].count(opcode) is None or (codes[name].count(opcode) == 0) == is_exchange
