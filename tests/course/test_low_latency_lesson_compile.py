"""What the compiler makes of the kernels of the lesson on low latency, at the sizes that are timed."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/14_low_latency.py"
COMMON = ("int32*", "uint64*", "int32*", "int32")
DISPATCH = (*COMMON, "int32*", "int64*", "int32*", "int32*")
ONE, MANY = "Sizes(2, 1, 7168, 8, 128)", "Sizes(2, 32, 7168, 8, 128)"
KERNELS = {  # expression, signature, system fences
    "a thread per vector": (f"make_dispatch(send_flag, receive_flag)({ONE})", DISPATCH, 1),
    "data as its own flag": (f"make_dispatch(send_data, receive_data)({ONE})", DISPATCH, 0),
    "combine": (f"make_combine(sum_rows)({ONE})", (*COMMON, "int32*", "int32*", "int64*", "int32*"), 0),
    "packed by expert": (f"make_packed(count_alone)({MANY})", DISPATCH, 0),
    "counted by warps": (f"make_packed(count_by_warp)({MANY})", DISPATCH, 0),
}
THREADS = 896


@pytest.fixture(scope="module")
def codes():
    kept = [
        node
        for node in ast.parse(NOTEBOOK.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        or (isinstance(node, ast.Assign) and {"NUMBERS", "NOT_HERE"} & {t.id for t in node.targets})
    ]
    own = "from moe_numba.course.lessons.low_latency.answers import count_by_warp, sum_rows"
    sizes = "from moe_numba.course.lessons.low_latency.runs import Sizes"
    source = "\n\n".join([*map(ast.unparse, kept), own, sizes])
    return compile_apart(source, {name: (text, types, THREADS, False) for name, (text, types, _) in KERNELS.items()})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_and_a_cta_fits(name, codes):
    code = codes[name]
    assert code.spilled_bytes == code.stack_bytes == 0 and not code.complaints
    assert code.registers * THREADS <= 65536


@pytest.mark.parametrize("name", KERNELS)
def test_only_a_flag_after_data_needs_a_system_fence(name, codes):
    assert codes[name].count("MEMBAR.ALL.SYS") in (KERNELS[name][2], None)
