"""What the compiler makes of the kernels of "The experts of a layer", for an older GPU and for Hopper."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/15_moe_layer.py"
GROUPS = (*(("int32*",) * 5), "int32")
SWIGLU = ("int32*", "int32*", "int32")
SUM = ("int32*", "int32*", "float32*", "int32*", "int32", "int32")
KERNELS = {  # expression, signature, threads
    "group": ("make_group(position)(Sizes(128, 8, 8))", GROUPS, 256),
    "SwiGLU, two columns": ("make_swiglu(activate_two, 2)", SWIGLU, 128),
    "SwiGLU, eight columns": ("make_swiglu(activate_eight, 8)", SWIGLU, 128),
    "sum, two columns": ("make_sum(sum_two, 2)", SUM, 128),
    "sum, eight columns": ("make_sum(sum_eight, 8)", SUM, 128),
    "gate_up": ("make_gate_up(dot)", ("int32*", "int32*", "int32*", "uint16*", "int32", "int32", "int32"), 128),
    "down": ("make_down(dot)", ("int32*", "int32*", "int32*", "float32*", "uint16*", "int32", "int32", "int32"), 128),
    "copy_4_bytes": ("copy_4_bytes", SWIGLU, 128),
    "copy_16_bytes": ("copy_16_bytes", SWIGLU, 128),
}
ARCHS = ((7, 5), (9, 0, "a"))
OWN = "position", "activate_eight", "sum_eight", "dot"


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = [
        node
        for node in ast.parse(NOTEBOOK.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
    ]
    own = f"from moe_numba.course.lessons.moe_layer.answers import {', '.join(OWN)}"
    sizes = "from moe_numba.course.lessons.moe_layer.runs import Sizes"
    return "\n\n".join([*map(ast.unparse, kept), own, sizes])


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: "sm_" + "".join(map(str, arch)))
def test_kernels_compile_without_spills(arch):
    requests = {name: (text, types, threads, False) for name, (text, types, threads) in KERNELS.items()}
    for name, code in compile_apart(source(), requests, arch).items():
        assert code.spilled_bytes == code.stack_bytes == 0 and not code.complaints, f"{name}: {code}"
        assert code.registers * KERNELS[name][2] <= 65536
        if "eight" in name and arch >= (9, 0):
            assert code.count("STG") == 1, name  # sixteen bytes at once
