"""Machine code of notebook 15's kernels for older GPUs and for Hopper; no GPU is needed."""

import ast
import re
from pathlib import Path

import pytest

from moe_numba.course.bench.records import code_hash
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.sass import compile_apart

TEXT = (Path(__file__).parents[2] / "notebooks" / "15_moe_layer.py").read_text()
CODE = "\n".join(code_hash.code_cells(TEXT))
GROUPS = (("int32*",) * 5) + ("int32",)
SUMS = (("int32*", "int32*", "float32*", "int32*", "int32", "int32"), 128)
COPY = (("int32*", "int32*", "int32"), 128)
KERNELS = {
    "make_chunk_per_warp(256, 8, 8)": (GROUPS, 256),
    "copy_4_bytes": COPY,
    "copy_16_bytes": COPY,
    "two_columns": SUMS,
    "eight_columns": SUMS,
    "empty": (("int32*",), 32),
    "read_in_order": (("int32*", "int32", "int32*"), 512),
}
HOPPER = {"read_boxes": ((TENSOR_MAP, "int32", "int32", "int32*"), 32)}  # TMA
CONSTANTS = {"STAGES", "BOX", "BOX_BYTES", "FULL"}  # which these kernels use
ARCHS = ((7, 5), (9, 0, "a"))
ONLY_SIMULATED = {"unstable", "sum_in_order"}  # a wrong kernel, and the stub of an exercise


def source():
    """The notebook's imports, kernels and device functions."""
    nodes = []
    for node in ast.parse(CODE).body:
        kernel = isinstance(node, ast.FunctionDef) and node.decorator_list and node.name not in ONLY_SIMULATED
        constant = isinstance(node, ast.Assign) and CONSTANTS & {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name)
        }
        if isinstance(node, (ast.Import, ast.ImportFrom)) or kernel or constant:
            nodes.append(ast.unparse(node))
    return "\n\n".join(nodes)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: "sm_" + "".join(map(str, arch)))
def test_kernels_compile_without_spills(arch):
    kernels = KERNELS | (HOPPER if arch >= (9, 0) else {})
    requests = {name: (name, signature, threads, name in HOPPER) for name, (signature, threads) in kernels.items()}
    for name, code in compile_apart(source(), requests, arch).items():
        assert code.spilled_bytes == 0 and code.stack_bytes == 0, f"{name}: {code}"
        assert code.registers * kernels[name][1] <= 65536


def test_all_of_the_notebooks_kernels_are_compiled():
    made = set(re.findall(r"^@c(?:uda\.jit|ache)\ndef (\w+)\(", TEXT, re.M))
    assert made == {name.partition("(")[0] for name in KERNELS | HOPPER} | ONLY_SIMULATED
